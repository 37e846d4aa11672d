"""The program that holds the drivers of Python tests."""


def test_started_by_another_name_it_says_which_drivers_it_has(programs):
    done = programs.run("test_drivers", "--help")
    assert done.status == 2 and "\n  csv_driver\n" in done.stderr and "\n  meeting_driver\n" in done.stderr, done.text
