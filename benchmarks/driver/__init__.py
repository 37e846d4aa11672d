"""The driver of the benchmarks: starts contenders, measures them in turn, compares and reports.

Modules, in the order in which they use each other:
    stats        medians, quartiles and ratios of pairs; no input or output
    results      what a run has measured, as JSON
    job          N ranks as processes that sleep until they are commanded
    contenders   how each contender is started
    interleave   rounds in which every contender has a turn, in random order
    suites       a module for each: what is measured, and which figures come of it; NAME_report has its tables where they
                 are many
    targets      the figures that the project promises
    compare      what got slower since another run
    tables       a table, for the terminal and in Markdown
    report       all tables of what was measured
    machine      where it was measured
"""
