"""The driver of the benchmarks: starts contenders, measures them in turn, compares and reports.

Modules, in the order in which they use each other:
    stats        medians, quartiles and ratios of pairs; no input or output
    results      what a run has measured, as JSON
    job          N ranks as processes that sleep until they are commanded
    contenders   how each contender is started
    interleave   rounds in which every contender has a turn, in random order
    collectives, training, comm_hooks, from_python   the suites: what is measured, and which figures come of it
    several_hosts   the suite over hosts that are network namespaces
    soak         ranks that fail in all ways, and what the others are told
    targets      the figures that the project promises
    compare      what got slower since another run
    tables       a table, for the terminal and in Markdown
    training_report, several_hosts_report, report   all tables of what was measured
    machine      where it was measured
"""
