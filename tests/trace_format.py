"""The rules of the Chrome trace event format, as far as Perfetto drops or misplaces events that break them."""

import math

NS = 1000  # in a microsecond, the format's unit
# "X": complete, "i": instant, "s", "t", "f": flow, "C": counter, "M": metadata
NEEDED = {
    "X": ("name", "ts", "dur", "pid", "tid"), "i": ("name", "ts", "pid", "tid"), "C": ("name", "ts", "pid", "args"),
    "s": ("name", "cat", "id", "ts", "pid", "tid"), "t": ("name", "cat", "id", "ts", "pid", "tid"),
    "f": ("name", "cat", "id", "ts", "pid", "tid"), "M": ("name", "pid", "args"),
}  # fmt: skip


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def nanoseconds(microseconds):
    return round(microseconds * NS)


def wrong_fields(event):
    """What an event lacks, or has of another type."""
    needed = NEEDED.get(event.get("ph"))
    if needed is None:
        return [f"unknown phase in {event}"]
    wrong = [f"no '{name}' in {event}" for name in needed if name not in event]
    wrong += [f"'{name}' is no number in {event}" for name in ("ts", "dur") if name in event and not is_number(event[name])]
    wrong += [f"'{name}' is no text in {event}" for name in ("name", "cat") if not isinstance(event.get(name, ""), str)]
    wrong += [f"'{name}' is neither number nor text in {event}" for name in ("pid", "tid", "id")
              if not isinstance(event.get(name, 0), (int, str))]  # fmt: skip
    if is_number(event.get("dur")) and event["dur"] < 0:
        wrong.append(f"it ends before it begins: {event}")
    if "args" in event and not isinstance(event["args"], dict):
        wrong.append(f"'args' is no object in {event}")
    if event["ph"] == "M" and event.get("name") in ("process_name", "thread_name") and not isinstance(event["args"].get("name"), str):
        wrong.append(f"no name in {event}")
    return wrong


def bars_by_thread(events):
    """(begin, end, name) of the complete events of each thread, those around others first."""
    threads = {}
    for event in events:
        if event["ph"] == "X":
            begin = nanoseconds(event["ts"])
            bar = (begin, begin + nanoseconds(event["dur"]), event["name"])
            threads.setdefault((event["pid"], event["tid"]), []).append(bar)
    for bars in threads.values():
        bars.sort(key=lambda bar: (bar[0], -bar[1]))
    return threads


def overlaps(bars):
    """Pairs of which one begins within the other and ends after it."""
    found, open_bars = [], []
    for bar in bars:
        while open_bars and open_bars[-1][1] <= bar[0]:
            open_bars.pop()
        if open_bars and open_bars[-1][1] < bar[1]:
            found.append((open_bars[-1], bar))
        else:
            open_bars.append(bar)
    return found


def loose_flows(events, threads):
    """Flows without a begin or an end, that go back in time, or that no bar is around."""
    wrong, begun, ended = [], {}, set()
    flows = [event for event in events if event["ph"] in "stf"]
    for event in sorted(flows, key=lambda event: (event["ts"], "stf".index(event["ph"]))):
        key = (event["cat"], event["name"], event["id"])
        if event["ph"] == "s":
            if key in begun:
                wrong.append(f"begins twice: {event}")
            begun[key] = event
        elif key not in begun:
            wrong.append(f"did not begin before: {event}")
        elif event["ph"] == "f":
            ended.add(key)
        at = nanoseconds(event["ts"])
        bars = threads.get((event["pid"], event["tid"]), [])
        if not any(begin <= at <= end for begin, end, _ in bars):
            wrong.append(f"no bar is around: {event}")
    return wrong + [f"does not end: {begun[key]}" for key in begun.keys() - ended]


def broken_rules(trace):
    """A line for each."""
    events = trace["traceEvents"]
    wrong = [line for event in events for line in wrong_fields(event)]
    if wrong:
        return wrong
    threads = bars_by_thread(events)
    wrong = [f"{thread}: {pair[1]} overlaps {pair[0]}" for thread, bars in threads.items() for pair in overlaps(bars)]
    return wrong + loose_flows(events, threads)
