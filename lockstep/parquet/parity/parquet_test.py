"""Parquet files that pyarrow wrote, read in C++: all values, nulls, shares of ranks, and what is refused."""

import base64
import datetime
import decimal
import functools
import json
import math

import pytest
import torch

pa = pytest.importorskip("pyarrow", reason="the component parquet is built from pyarrow's Arrow C++")
pq = pytest.importorskip("pyarrow.parquet")
encryption = pytest.importorskip("pyarrow.parquet.encryption")

COMPRESSIONS = ("snappy", "gzip", "zstd", "lz4", "brotli", "none")
NUMBERS, STRINGS, LISTS = range(3)
INTEGERS = {"int8": torch.int8, "uint8": torch.uint8, "int16": torch.int16, "uint16": torch.int32, "int32": torch.int32,
            "uint32": torch.int64, "int64": torch.int64, "uint64": torch.int64}
FLOATS = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
TIMES = {"date32": (pa.date32(), pa.int32()), "date64": (pa.date64(), pa.int64()), "time32": (pa.time32("ms"), pa.int32()),
         "time64": (pa.time64("us"), pa.int64()), "timestamp": (pa.timestamp("us", tz="UTC"), pa.int64()),
         "duration": (pa.duration("ms"), pa.int64())}


@pytest.fixture(scope="module")
def driver(bin_dir, ask_driver):
    path = bin_dir / "parquet_driver"
    if not path.exists():
        pytest.fail(f"there is no {path}, though pyarrow is here; do: build again, and read what cmake says of Arrow")
    return functools.partial(ask_driver, path.name)


def ask(driver, *commands):
    """The driver's answers, and the tables of each: lists of {column: {part: tensor}}."""
    lines = [json.dumps(command | {"files": [str(file) for file in command["files"]]}) for command in commands]
    return [json.loads(line) for line in driver(lines)]


def tables_of(path):
    return torch.load(path, weights_only=False)


def masked(values, valid):
    """Values with None where they are not there; rows have one flag, or one for each of their elements."""
    return [masked(value, there) if isinstance(there, list) else value if there else None
            for value, there in zip(values, valid, strict=True)]


def plain(column):
    """A column as pyarrow's to_pylist() has it."""
    values, offsets, kind = column["values"], column.get("offsets"), int(column["kind"])
    elements = values.tolist()
    if "element_valid" in column:
        elements = masked(elements, column["element_valid"].tolist())
    if kind != NUMBERS:
        offsets = offsets.tolist()
        assert offsets[0] == 0 and offsets[-1] == len(elements)
        elements = [elements[begin:end] for begin, end in zip(offsets, offsets[1:])]
    if kind == STRINGS:
        elements = [bytes(element) for element in elements]
    return masked(elements, column["valid"].tolist()) if "valid" in column else elements


def expected(array):
    """pyarrow's values, with strings as bytes, times as their numbers, and bytes of a fixed number as lists."""
    kind = array.type
    for logical, stored in TIMES.values():
        if kind == logical:
            return array.cast(stored).to_pylist()
    if kind == pa.float16():
        array = array.cast(pa.float32())
    values = array.to_pylist()
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return [None if value is None else value.encode() for value in values]
    if pa.types.is_fixed_size_binary(kind):
        return [None if value is None else list(value) for value in values]
    return values


def same(ours, theirs):
    """Equality in which NaN equals itself."""
    if isinstance(theirs, list):
        return isinstance(ours, list) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, float) and math.isnan(theirs):
        return isinstance(ours, float) and math.isnan(ours)
    return ours == theirs and (ours is None) == (theirs is None)


def every(pattern, rows, start=0):
    """rows values, some of them None when the pattern is one with None."""
    return [pattern[(start + i) % len(pattern)] for i in range(rows)]


def zoo(rows, nulls, start=0):
    """A table with a column of each type that can be read; `nulls`: with nulls in all."""
    none = [None] if nulls else []
    columns = {}
    for name in INTEGERS:
        unsigned = name.startswith("u")
        bits = int(name.lstrip("uint"))
        # uint64 beyond int64's largest is refused, and tested elsewhere.
        largest = min(2**bits - 1, 2**63 - 1) if unsigned else 2 ** (bits - 1) - 1
        least = 0 if unsigned else -(2 ** (bits - 1))
        columns[name] = pa.array(every([0, 1, largest, least, 7, *none], rows, start), getattr(pa, name)())
    for name in FLOATS:
        pattern = [0.0, -1.5, 2.25, float("inf"), float("nan"), *none]
        columns[name] = pa.array(every(pattern, rows, start), getattr(pa, name)())
    columns["bool"] = pa.array(every([True, False, False, True, True, *none], rows, start))
    for name, (logical, stored) in TIMES.items():
        day = 86_400_000 if name == "date64" else 1
        columns[name] = pa.array(every([0, 5 * day, 77 * day, *none], rows, start), stored).cast(logical)
    texts = ["", "a", "zwölf Boxkämpfer", "x" * 300, "\0 within", *none]
    columns["string"] = pa.array(every(texts, rows, start))
    columns["large_string"] = pa.array(every(texts, rows, start + 1), pa.large_string())
    columns["binary"] = pa.array(every([b"", b"\xff\x00\xfe", b"abc", *none], rows, start))
    columns["category"] = pa.array(every(["red", "green", "blue", *none], rows, start)).dictionary_encode()
    columns["code"] = pa.array(every([5, -3, *none], rows, start), pa.int32()).dictionary_encode()
    columns["digest"] = pa.array(every([b"1234", b"\0\1\2\3", *none], rows, start), pa.binary(4))
    lists = [[1, 2, 3], [], [4], [5, *none, 6], *none]
    columns["list"] = pa.array(every(lists, rows, start), pa.list_(pa.int32()))
    columns["large_list"] = pa.array(every([[0.5], [], [1.5, *none, 2.5], *none], rows, start), pa.large_list(pa.float64()))
    columns["flags"] = pa.array(every([[True, *none], [], [False, True]], rows, start), pa.list_(pa.bool_()))
    columns["view"] = pa.array(every(texts, rows, start), pa.string_view())
    pair = [3, *(none or [4])]
    # Arrow before 26 writes lists of a fixed length that are missing themselves, and can't read them.
    whole = none if int(pa.__version__.partition(".")[0]) >= 26 else []
    columns["vector"] = pa.array(every([[1.0, 2.0], pair, *whole], rows, start), pa.list_(pa.float32(), 2))
    columns["grid"] = pa.array(every([[[1, 2], pair], *whole], rows, start), pa.list_(pa.list_(pa.int8(), 2), 2))
    columns["points"] = pa.array(every([[[1, 2], pair], [], [pair], *none], rows, start), pa.list_(pa.list_(pa.int16(), 2)))
    return pa.table(columns)


def lists_of(table):
    return {name: expected(table[name]) for name in table.column_names}


def check_table(ours, theirs):
    """theirs: pyarrow's table, or lists_of() it."""
    theirs = theirs if isinstance(theirs, dict) else lists_of(theirs)
    assert set(ours) == set(theirs)
    for name, values in theirs.items():
        assert same(plain(ours[name]), values), (name, plain(ours[name]), values)


def check_types(ours):
    for name, dtype in (INTEGERS | FLOATS | {"bool": torch.bool, "list": torch.int32, "large_list": torch.float64}).items():
        assert ours[name]["values"].dtype == dtype, name
    assert ours["vector"]["values"].shape[1:] == (2,) and ours["digest"]["values"].shape[1:] == (4,)
    kinds = {name: int(column["kind"]) for name, column in ours.items()}
    assert {name for name, kind in kinds.items() if kind == STRINGS} == {
        "string", "large_string", "binary", "category", "view"}
    assert {name for name, kind in kinds.items() if kind == LISTS} == {"list", "large_list", "flags", "points"}


@pytest.mark.parametrize("nulls", [False, True])
def test_all_values_of_all_types_and_compressions(driver, tmp_path, nulls):
    table = zoo(53, nulls)
    commands = []
    for number, compression in enumerate(COMPRESSIONS):
        file, out = tmp_path / f"{compression}.parquet", tmp_path / f"{compression}.pt"
        version = {"data_page_version": "2.0"} if number % 2 else {"use_dictionary": False, "write_page_checksum": True}
        pq.write_table(table, file, compression=compression, row_group_size=17, **version)
        commands.append({"read": "row_groups", "files": [file], "out": str(out), "use_threads": number == 3}
                        | ({"nulls": "mask"} if nulls else {}))
    for command, answer in zip(commands, ask(driver, *commands), strict=True):
        assert "error" not in answer, answer
        assert answer["row_counts"] == [17, 17, 17, 2]
        assert [name for name, _ in answer["schema"]] == table.column_names
        assert dict(answer["schema"])["timestamp"] == "timestamp[us, tz=UTC]"
        groups = tables_of(command["out"])
        check_types(groups[0])
        file = pq.ParquetFile(command["files"][0])
        for group, ours in enumerate(groups):
            check_table(ours, file.read_row_group(group))


def test_batches_span_row_groups_and_files(driver, tmp_path):
    parts = [zoo(40, True), zoo(9, True, start=2).slice(0, 1), zoo(9, True).slice(0, 0), zoo(29, True, start=3)]
    files = [tmp_path / f"{i}.parquet" for i in range(len(parts))]
    for file, part, size in zip(files, parts, (7, 1, 10, 13), strict=True):
        pq.write_table(part, file, row_group_size=size)
    whole = {name: [] for name in parts[0].column_names}
    for file in files:
        for name, values in lists_of(pq.read_table(file)).items():
            whole[name] += values
    common = {"read": "batches", "files": files, "nulls": "mask"}
    commands = [common | {"batch_size": size, "drop_last": drop, "read_ahead": ahead, "out": str(tmp_path / f"{i}.pt")}
                for i, (size, drop, ahead) in enumerate([(1, False, True), (8, False, False), (8, True, True),
                                                         (33, False, True), (70, True, True), (500, False, True),
                                                         (500, True, False)])]
    order = [69, 3, 3, 41, 40, 0, 68]
    commands.append({"read": "rows", "files": files, "nulls": "mask", "indices": order, "out": str(tmp_path / "rows.pt")})
    *answers, rows = ask(driver, *commands)
    for command, answer in zip(commands, answers, strict=False):
        assert "error" not in answer, answer
        size, drop = command["batch_size"], command["drop_last"]
        batches = tables_of(command["out"])
        starts = range(0, 70 // size * size if drop else 70, size)
        assert answer["size"] == len(batches) == len(starts)
        for start, batch in zip(starts, batches, strict=True):
            check_table(batch, {name: values[start:start + size] for name, values in whole.items()})
    assert "error" not in rows, rows
    (chosen,) = tables_of(tmp_path / "rows.pt")
    check_table(chosen, {name: [values[row] for row in order] for name, values in whole.items()})


def test_columns_are_those_asked_for(driver, tmp_path):
    file = tmp_path / "zoo.parquet"
    table = zoo(20, False)
    pq.write_table(table.append_column("money", pa.array([decimal.Decimal("1.5")] * 20)), file, row_group_size=9)
    chosen = ["string", "int8", "list"]
    (answer,) = ask(driver, {"read": "loader", "files": [file], "columns": chosen, "batch_size": 2, "out": str(tmp_path / "o")})
    assert [name for name, _ in answer["schema"]] == chosen and answer["size"] == 2
    first, second = tables_of(tmp_path / "o")
    check_table(first, table.select(chosen).slice(0, 18))
    check_table(second, table.select(chosen).slice(18))


def test_fill_values_stand_in_place_of_nulls(driver, tmp_path):
    file = tmp_path / "nulls.parquet"
    pq.write_table(pa.table({"i": pa.array([1, None, 3]), "f": pa.array([None, 0.5, None], pa.float32()),
                             "b": pa.array([None, True, None]), "s": pa.array(["a", None, "c"]),
                             "c": pa.array([None, "u", "v"]).dictionary_encode(),
                             "l": pa.array([[1, None], None, [2]]), "v": pa.array([[1, None], [3, 4], [5, 6]], pa.list_(pa.int8(), 2))}),
                   file)
    fill = {"i": -1, "f": 0.25, "b": True, "s": "none", "c": "w", "l": 9, "v": 7}
    common = {"read": "row_groups", "files": [file], "fill": fill}
    filled, both = ask(driver, common | {"out": str(tmp_path / "0")}, common | {"nulls": "mask", "out": str(tmp_path / "1")})
    assert "error" not in filled and "error" not in both
    values = {"i": [1, -1, 3], "f": [0.25, 0.5, 0.25], "b": [True, True, True], "s": [b"a", b"none", b"c"],
              "c": [b"w", b"u", b"v"], "l": [[1, 9], [], [2]], "v": [[1, 7], [3, 4], [5, 6]]}
    (table,) = tables_of(tmp_path / "0")
    assert {name: plain(column) for name, column in table.items()} == values
    assert not any("valid" in column or "element_valid" in column for column in table.values())
    (table,) = tables_of(tmp_path / "1")
    assert table["i"]["valid"].tolist() == [True, False, True] and table["i"]["values"].tolist() == [1, -1, 3]
    assert table["l"]["element_valid"].tolist() == [True, False, True] and table["l"]["valid"].tolist() == [True, False, True]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_share_all_rows_without_overlap(driver, tmp_path, ranks):
    """Row groups of odd sizes in two files; each epoch in another order, and the same with and without reading ahead."""
    files, count = [tmp_path / "a.parquet", tmp_path / "b.parquet"], 0
    for file, sizes in zip(files, ([5, 50, 1, 17, 17], [30, 2, 2, 9, 23]), strict=True):
        with pq.ParquetWriter(file, pa.schema({"id": pa.int64()})) as writer:
            for size in sizes:
                writer.write_table(pa.table({"id": pa.array(range(count, count + size))}), row_group_size=size)
                count += size
    cases = [(epoch, rank, even, ahead) for epoch in (0, 1) for rank in range(ranks)
             for even, ahead in ((False, True), (False, False), (True, True))]
    commands = [{"read": "batches", "files": files, "batch_size": 10, "ranks": ranks, "rank": rank, "epoch": epoch,
                 "shuffle": True, "seed": 3, "even_batches": even, "read_ahead": ahead, "out": str(tmp_path / f"{i}")}
                for i, (epoch, rank, even, ahead) in enumerate(cases)]
    seen, sizes = {}, {}
    for case, command, answer in zip(cases, commands, ask(driver, *commands), strict=True):
        assert "error" not in answer, answer
        batches = [table["id"]["values"].tolist() for table in tables_of(command["out"])]
        assert answer["size"] == len(batches)
        seen[case] = [value for batch in batches for value in batch]
        sizes[case] = [len(batch) for batch in batches]
    for epoch in (0, 1):
        shares = [seen[epoch, rank, False, True] for rank in range(ranks)]
        assert sorted(value for share in shares for value in share) == list(range(count))
        assert shares == [seen[epoch, rank, False, False] for rank in range(ranks)]
        assert len({tuple(sizes[epoch, rank, True, True]) for rank in range(ranks)}) == 1
        fewest = min(len(share) for share in shares)
        assert all(seen[epoch, rank, True, True] == shares[rank][:fewest] for rank in range(ranks))
        assert shares[0] != sorted(shares[0])
    assert seen[0, 0, False, True] != seen[1, 0, False, True]


def test_memory_in_flight_stays_within_the_limit(driver, tmp_path):
    """Numbers, strings and lists, of which dictionaries and run lengths leave little in the file."""
    rows = 3000
    table = pa.table({"i": pa.array([7] * rows, pa.int64()), "s": pa.array(["the same text"] * rows),
                      "l": pa.array([[1, 2, 3], []] * (rows // 2), pa.list_(pa.float32()))})
    file = tmp_path / "repeats.parquet"
    pq.write_table(table, file, row_group_size=250, compression="zstd")
    limits = [1, 30_000, 60_000, 10**9]
    commands = [{"read": "batches", "files": [file], "batch_size": 64, "memory_limit": limit, "out": str(tmp_path / f"{limit}")}
                for limit in limits]
    for limit, answer in zip(limits, ask(driver, *commands), strict=True):
        assert "error" not in answer, answer
        taken = [bytes_ for _, bytes_ in answer["bytes"]]
        for foreseen, bytes_ in answer["bytes"]:
            assert bytes_ <= foreseen <= bytes_ * 1.2, answer["bytes"]
        assert file.stat().st_size < sum(taken) / 5, "so the file's own sizes would have been no guide"
        assert max(taken) <= answer["peak"] <= max(limit, max(foreseen for foreseen, _ in answer["bytes"]))
        assert sum(batch["i"]["values"].numel() for batch in tables_of(tmp_path / f"{limit}")) == rows


class Keys(encryption.KmsClient):
    """Hands keys out as they are."""

    def __init__(self, _config):
        super().__init__()

    def wrap_key(self, key, _name):
        return base64.b64encode(key)

    def unwrap_key(self, wrapped, _name):
        return base64.b64decode(wrapped)


def write_encrypted(path, table, plaintext_footer):
    factory = encryption.CryptoFactory(Keys)
    properties = factory.file_encryption_properties(
        encryption.KmsConnectionConfig(),
        encryption.EncryptionConfiguration(footer_key="f", column_keys={"c": ["x"]}, plaintext_footer=plaintext_footer))
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)


def refused_files(folder):
    """{name: (file, words of the error)} of files that are damaged or none of Parquet's."""
    good = folder / "good.parquet"
    pq.write_table(pa.table({"x": list(range(1000))}), good, compression="none")
    content = good.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    files = {"missing": (None, "there is no file or folder"), "empty": (b"", "it has 0 bytes"),
             "text": (b"id,name\n1,one\n", "does not begin with PAR1"),
             "truncated": (content[:-40], "truncated"), "magic alone": (b"PAR1PAR1PAR1", "cannot read"),
             "footer": (content[:footer] + b"\xff" * 30 + content[footer + 30:], "cannot read"),
             "footer too long": (content[:-8] + b"\xff\xff\xff\x7f" + b"PAR1", "cannot read")}
    result = {}
    for name, (data, words) in files.items():
        path = folder / f"{name}.parquet"
        if data is not None:
            path.write_bytes(data)
        result[name] = (path, words)
    for name, plaintext in (("encrypted", False), ("encrypted columns", True)):
        path = folder / f"{name}.parquet"
        write_encrypted(path, pa.table({"x": [1, 2], "y": [3, 4]}), plaintext)
        result[name] = (path, "encrypted")
    return result


def test_damaged_and_foreign_files_are_errors_that_name_the_file(driver, tmp_path):
    files = refused_files(tmp_path)
    answers = ask(driver, *({"read": "row_groups", "files": [file]} for file, _ in files.values()))
    for (name, (file, words)), answer in zip(files.items(), answers, strict=True):
        assert str(file) in answer.get("error", "") and words in answer["error"], (name, answer)


def test_empty_files_have_no_batches(driver, tmp_path):
    rows, groups = tmp_path / "rows.parquet", tmp_path / "groups.parquet"
    pq.write_table(pa.table({"x": pa.array([], pa.int64()), "s": pa.array([], pa.string())}), rows)
    pq.ParquetWriter(groups, pa.schema({"x": pa.int64(), "s": pa.string()})).close()
    assert pq.ParquetFile(groups).num_row_groups == 0
    commands = [{"read": how, "files": [file], "out": str(tmp_path / "out"), "batch_size": 4}
                for file in (rows, groups) for how in ("batches", "row_groups", "loader", "collate")]
    answers = ask(driver, *commands)
    assert not [answer for answer in answers if "error" in answer]
    assert [answer.get("size") for answer in answers[::4]] == [0, 0]


REFUSED = {
    "missing column": ({"columns": ["a", "q"]}, "ValueError", r"has no column 'q'; its columns are 'a', 'n', 's', 'ln', 'dup'"),
    "twice": ({"columns": ["a", "a"]}, "ValueError", "names 'a' twice"),
    "nulls": ({"columns": ["n"]}, "Error", "column 'n' in row group 0 of FILE holds 3 nulls (it has 5 rows)"),
    "one null": ({"columns": ["s"]}, "Error", "column 's' in row group 0 of FILE holds 1 null (it has 5 rows)"),
    "nulls in lists": ({"columns": ["ln"]}, "Error", "holds 2 nulls inside of its lists"),
    "unknown fill": ({"columns": ["a"], "fill": {"n": 1}}, "ValueError", ".fill_nulls names a column 'n'; the columns are 'a'"),
    "text for numbers": ({"columns": ["n"], "fill": {"n": "x"}}, "ValueError", "column 'n' does not fit its type, double"),
    "number for text": ({"columns": ["s"], "fill": {"s": 1}}, "ValueError", "column 's' does not fit its type, string"),
    "fraction for integers": ({"columns": ["ln"], "fill": {"ln": 0.5}}, "ValueError", "does not fit its type, list"),
    "too large": ({"columns": ["dup"], "fill": {"dup": 200}}, "ValueError", "does not fit its type, int8"),
}
KINDS = {
    "decimal": (pa.array([decimal.Decimal("1.25")]), "cast them to float64"),
    "struct": (pa.array([{"a": 1}]), "write its fields as columns"),
    "map": (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), "torch has nothing like it"),
    "list of strings": (pa.array([["a"]]), "flatten them"),
    "list of lists": (pa.array([[[1]]]), "flatten them"),
    "list of structs": (pa.array([[{"a": 1}]]), "flatten them"),
    "null": (pa.nulls(1), "all its values are null"),
}


def test_what_cannot_be_read_is_refused_with_a_remedy(driver, tmp_path):
    file = tmp_path / "some.parquet"
    pq.write_table(pa.table({"a": [1, 2, 3, 4, 5], "n": [1.0, None, 2.0, None, None], "s": ["a", None, "b", "c", "d"],
                             "ln": [[1, None], [], [None], [2], [3]], "dup": pa.array([1] * 5, pa.int8())}), file)
    commands = [{"read": "row_groups", "files": [file], **options} for options, *_ in REFUSED.values()]
    for name, (array, _) in KINDS.items():
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"x": array, "ok": [1]}), path)
        commands += [{"read": "row_groups", "files": [path]}, {"read": "row_groups", "files": [path], "columns": ["ok"]}]
    large = tmp_path / "large.parquet"
    pq.write_table(pa.table({"u": pa.array([1, 2**63], pa.uint64())}), large)
    commands.append({"read": "row_groups", "files": [large]})
    answers = ask(driver, *commands)
    for (name, (_, kind, words)), answer in zip(REFUSED.items(), answers, strict=False):
        assert words.replace("FILE", str(file)) in answer.get("error", ""), (name, answer)
        assert answer["type"] == kind, (name, answer)
    rest = answers[len(REFUSED):]
    for (name, (_, words)), answer, without in zip(KINDS.items(), rest[::2], rest[1::2], strict=False):
        assert "column 'x'" in answer.get("error", "") and words in answer["error"], (name, answer)
        assert "error" not in without, (name, without)
    assert "9223372036854775808" in rest[-1]["error"] and "column 'u'" in rest[-1]["error"]


def test_files_must_be_alike(driver, tmp_path):
    tables = {"first": {"x": [1], "y": ["a"]}, "other type": {"x": [1.5], "y": ["a"]}, "one less": {"x": [1]},
              "one more": {"x": [1], "y": ["a"], "z": [1]}, "other order": {"y": ["b"], "x": [2]}}
    files = {name: tmp_path / f"{name}.parquet" for name in tables}
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), files[name])
    pairs = [[files["first"], file] for file in files.values()]
    commands = [{"read": "batches", "files": pair, "batch_size": 2, "out": str(tmp_path / "out")} for pair in pairs]
    same_, kind, less, more, order = ask(driver, *commands)
    assert "error" not in same_ and "error" not in order
    (batch,) = tables_of(tmp_path / "out")
    assert plain(batch["x"]) == [1, 2] and plain(batch["y"]) == [b"a", b"b"]
    for answer, words in ((kind, "column 'x' is double in"), (less, "has no column 'y'"), (more, "has a column 'z'")):
        assert words in answer["error"] and str(tmp_path) in answer["error"], answer


def test_times_are_in_the_files_unit(driver, tmp_path):
    when = datetime.datetime(2024, 2, 29, 12, 30, 15, 250_000)
    commands = []
    for unit in ("s", "ms", "us", "ns"):
        file = tmp_path / f"{unit}.parquet"
        value = when.replace(microsecond=0) if unit == "s" else when
        pq.write_table(pa.table({"t": pa.array([value], pa.timestamp(unit))}), file)
        commands.append({"read": "row_groups", "files": [file], "out": str(tmp_path / unit)})
    for command, answer in zip(commands, ask(driver, *commands), strict=True):
        stored = pq.read_table(command["files"][0])["t"]
        assert answer["schema"] == [["t", str(stored.type)]]
        assert plain(tables_of(command["out"])[0]["t"]) == stored.cast(pa.int64()).to_pylist()


@pytest.mark.parametrize("how, thread, scopes", [
    ("batches", "lockstep-rows", ("Parquet: read a row group", "Parquet: wait for room")),
    ("loader", "lockstep-loader", ("DataLoader: make a batch", "DataLoader worker: wait for room"))])
def test_a_trace_shows_what_the_readers_thread_does(run_driver, tmp_path, how, thread, scopes):
    """LOCKSTEP_PROFILE records the first five of eight batches. The thread is at most two ahead, of batches with room for one row
    group none, so that it waits and makes some from begin to end while it is recorded."""
    file, traces = tmp_path / "x.parquet", tmp_path / "traces"
    pq.write_table(pa.table({"x": list(range(32))}), file, row_group_size=4)
    command = {"read": how, "files": [str(file)], "batch_size": 4 if how == "batches" else 1, "memory_limit": 1}
    done = run_driver("parquet_driver", given=json.dumps(command) + "\n", LOCKSTEP_PROFILE=f"wait:0,warmup:0,active:5,dir={traces}")
    assert "error" not in json.loads(done.stdout), done.stdout
    (trace,) = [json.loads(path.read_text())["traceEvents"] for path in traces.iterdir()]
    rows = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    for scope in scopes:
        found = [event for event in trace if event["ph"] == "X" and event["name"] == scope]
        assert found and all(f"({thread})" in rows[event["tid"]] and event["dur"] >= 0 for event in found), scope
