"""CsvDataset against Python's csv module and float(), over files that csv.writer wrote and files that it did not."""

import csv
import gzip
import math
import random

FILES = 120


def numbers(text):
    return [float.fromhex(word) for word in text.split()]


def same(a, b):
    return a == b or (math.isnan(a) and math.isnan(b))


def random_number(rng):
    return rng.choice([
        str(rng.randrange(-1000, 1000)), repr(rng.uniform(-1e9, 1e9)), repr(rng.gauss(0, 1e-8)), f" {rng.random():.3e} ",
        "1e400", "-1e400", "1e-400", "+2.5", ".5", "5.", "inf", "-Infinity", "nan", "0.1", "1E5", "-0",
    ])  # fmt: skip


def random_word(rng):
    return rng.choice(["red", "green", "a,b", 'he said "no"', "two\nlines", "cr\rlf\r\n", "", "é", " blank ", "; |\t"])


def test_reads_what_csv_writer_wrote(ask_driver, tmp_path):
    rng = random.Random(71)
    lines, expected = [], []
    for number in range(FILES):
        columns, rows = rng.randrange(2, 7), rng.randrange(1, 30)
        categories = [column for column in range(columns) if rng.random() < 0.3]
        delimiter, header = rng.choice(",;|"), rng.random() < 0.5
        table = [[(random_word if c in categories else random_number)(rng) for c in range(columns)] for _ in range(rows)]
        path = tmp_path / f"{number}.csv{rng.choice(['', '.gz'])}"
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "wt", newline="", encoding=rng.choice(["utf-8", "utf-8-sig"])) as file:
            writer = csv.writer(
                file, delimiter=delimiter, lineterminator=rng.choice(["\n", "\r\n"]), quoting=rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
            )
            writer.writerows([[f"name {c}" for c in range(columns)]] * header + table)
        with opener(path, "rt", newline="", encoding="utf-8-sig") as file:
            assert list(csv.reader(file, delimiter=delimiter))[header:] == table
        target = rng.choice([None, rng.randrange(columns)])
        features = [column for column in range(columns) if column != target]
        rng.shuffle(features)
        codes = {c: {word: code for code, word in enumerate(sorted({row[c] for row in table}, key=str.encode))} for c in categories}
        values = [[codes[c][row[c]] if c in categories else float(row[c]) for c in range(columns)] for row in table]
        expected.append(([row[c] for row in values for c in features], [] if target is None else [row[target] for row in values]))
        used = [c for c in categories if c == target or c in features]
        target_word = "" if target is None else target
        lines.append(f"{path}\t{delimiter}\t{int(header)}\t{target_word}\t{','.join(map(str, features))}\t{','.join(map(str, used))}")
    for line, got, (features, targets) in zip(lines, ask_driver("csv_driver", lines), expected, strict=True):
        assert not got.startswith("error"), (line, got)
        ours = [numbers(part) for part in got.split("|")]
        assert [len(part) for part in ours] == [len(features), len(targets)], line
        assert all(same(*pair) for pair in zip(ours[0] + ours[1], features + targets, strict=True)), line


def test_refuses_what_a_strict_csv_reader_refuses(ask_driver, tmp_path):
    """Short texts of the characters that matter: both read the same rows, or both refuse."""
    rng = random.Random(5)
    lines, texts = [], []
    for number in range(600):
        text = "".join(rng.choice(['"', '"', ",", "\n", "\r", "1", "2"]) for _ in range(rng.randrange(1, 14)))
        path = tmp_path / f"{number}.csv"
        path.write_bytes(text.encode())
        texts.append(text)
        lines.append(f"{path}\t,\t0\t\t\t")
    refused = 0
    for text, got in zip(texts, ask_driver("csv_driver", lines), strict=True):
        try:
            rows = [row for row in csv.reader(text.splitlines(keepends=True), strict=True) if row]
            want = [float(field) for row in rows for field in row]
            good = bool(rows) and len({len(row) for row in rows}) == 1
        except (csv.Error, ValueError):
            good = False
        refused += not good
        if good:
            assert not got.startswith("error") and numbers(got.split("|")[0]) == want, (text, got)
        else:
            assert got.startswith("error: "), (text, got)
    assert 50 < refused < 590
