"""Rows and media that are damaged or hostile: refused with file and line, or skipped, counted and listed."""

import gzip
import io
import json
import os
import struct
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import yaml
from corpus import Case
from fixtures import CHATML, make_tokenizer
from hostile import Medium, media, picture
from omni import LISTENING, VISION
from processes import Result
from tiny import SHAPE

MODALITIES = {
    "image": {"encoder": {"kind": "vision", "config": VISION}},
    "audio": {
        "encoder": {
            "kind": "audio",
            "config": LISTENING,
            "options": {"sample_rate": 2000, "hop_length": 50, "n_fft": 100},
        }
    },
    "video": {"encoder": {"kind": "video", "config": VISION, "options": {"fps": 2, "max_frames": 3}}},
}
MODEL = {
    "foundation": {"config": {"model_type": "llama"} | SHAPE | {"vocab_size": 544}},
    "modalities": MODALITIES,
}
GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
making = Lock()

Write = Callable[[Path], Path]  # lays out a folder; the data source in it


def shared_tokenizer(folder: Path) -> Path:
    """One for all cases, beside their folders."""
    with making:
        place = folder.parent / "tokenizer"
        if not place.exists():
            make_tokenizer(place)
    return place


def inspected(folder: Path, write: Write, on_bad_row: str = "error", template: str | None = None) -> list[object]:
    source = write(folder)
    place = shared_tokenizer(folder)
    if template is not None:
        place = folder / "tokenizer"
        make_tokenizer(place, "template")
        (place / "chat_template.jinja").write_text(template)
    data = {"sources": [{"path": str(source)}], "pack_tokens": 256, "lanes": 1, "shuffle": False, "look_ahead": 1}
    config = {"model": MODEL | {"tokenizer": str(place)}, "data": data | {"on_bad_row": on_bad_row}}
    path = folder / "omni.yaml"
    path.write_text(yaml.safe_dump(config | {"train": {"steps": 1, "packs_per_step": 1}}))
    return ["data", "inspect", path, "--samples", "8"]


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "b"}], **fields}


def lines(*rows: Any) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def write_lines(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(lines(*rows))
    return path


# Media


def write_medium(folder: Path, medium: Medium) -> Path:
    (folder / medium.file).write_bytes(medium.data)
    part = {"type": medium.modality, medium.modality: medium.file}
    return write_lines(folder, GOOD, chat([part]))


def media_cases() -> Iterator[Case]:
    # every third as its own command: test_hostile_data.py reads each, and the last case here has all that are bad
    for medium in list(media())[::3]:
        is_good = medium.file.startswith("good")
        says = () if is_good else ("rows.jsonl:2", medium.file, medium.reason)
        yield Case(medium.title, partial(inspected, write=partial(write_medium, medium=medium)), says)
    yield Case("every damaged medium in one file, skipped", inspected_page, (), all_bad)


BAD = [medium for medium in media() if not medium.file.startswith("good")]


def write_all(folder: Path) -> Path:
    rows = [GOOD]
    for number, medium in enumerate(BAD):
        (folder / f"{number}").mkdir()
        file = f"{number}/{medium.file}"
        (folder / file).write_bytes(medium.data)
        rows.append(chat([{"type": medium.modality, medium.modality: file}]))
    return write_lines(folder, *rows)


def inspected_page(folder: Path) -> list[object]:
    """The page lists all bad rows, the terminal only the first."""
    return [*inspected(folder, write_all, "skip"), "--out", folder / "page.html"]


def all_bad(folder: Path, result: Result) -> str | None:
    page = (folder / "page.html").read_text() if (folder / "page.html").exists() else ""
    missing = [
        f"rows.jsonl:{number}"
        for number, medium in enumerate(BAD, start=2)
        if f"rows.jsonl:{number}: " not in page or f"{number - 2}/{medium.file}" not in page
    ]
    return f"{', '.join(missing)} are not listed" if missing else None


# Values in the row, and files that are none


def item(modality: str, value: Any, **options: Any) -> Write:
    return lambda folder: write_lines(folder, GOOD, chat([{"type": modality, modality: value, **options}]))


def named(make: Callable[[Path], str]) -> Write:
    return lambda folder: item("image", make(folder))(folder)


def pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe.png")
    return "pipe.png"


def link(folder: Path, target: str) -> str:
    (folder / "link.png").symlink_to(target)
    return "link.png"


def empty(folder: Path) -> str:
    (folder / "empty.png").touch()
    return "empty.png"


def inside(folder: Path) -> str:
    (folder / "folder.png").mkdir()
    return "folder.png"


VALUES: dict[str, tuple[Write, str]] = {
    "a pipe as a picture": (named(pipe), "pipe.png"),
    "a folder as a picture": (named(inside), "folder.png"),
    "an empty file as a picture": (named(empty), "empty.png"),
    "a link to a device as a picture": (named(partial(link, target="/dev/zero")), "outside"),
    "a link out of the folder": (named(partial(link, target="/etc/hostname")), "outside"),
    "a link to itself": (named(partial(link, target="link.png")), "link.png"),
    "a link to nothing": (named(partial(link, target="gone.png")), "link.png does not exist"),
    "a path out of the folder": (item("image", "../../etc/passwd"), "outside"),
    "an absolute path": (item("image", "/dev/zero"), "outside"),
    "a path with a zero byte": (item("image", "a\0b.png"), "is not a valid path"),
    "a path of 3000 characters": (item("image", "a" * 3001), "is not a valid path"),
    "a missing file": (item("image", "gone.png"), "gone.png does not exist"),
    "garbage for base64": (item("image", {"bytes": "%%%%"}), "base64"),
    "base64 of garbage": (item("image", {"bytes": "AAAA"}), "image given as bytes"),
    "a data URL of garbage": (item("image", "data:image/png;base64,@@@"), "base64"),
    "a data URL of nothing": (item("image", "data:image/png;base64,"), "empty"),
    "an address on the network": (item("image", "https://example.org/x.png"), "network"),
    "a number for a picture": (item("image", 7), "image given as int"),
    "true for a picture": (item("image", True), "image given as bool"),
    "an empty list for a picture": (item("image", []), "empty"),
    "an empty object for a picture": (item("image", {}), "empty"),
    "an object for a picture": (item("image", {"a": [1]}), "image given as dict"),
    "ragged pixels": (item("image", [[1, 2], [3]]), "image given as list"),
    "pixels of text": (item("image", [["a", "b"], ["c", "d"]]), "image given as list"),
    "pixels below 0": (item("image", [[-1, 2], [3, 4]]), "0..255"),
    "pixels above 255": (item("image", [[1, 256], [3, 4]]), "0..255"),
    "pixels that are no numbers": (item("image", [[float("nan"), 0.5], [0.5, 0.5]]), "0..1"),
    "pixels of endless value": (item("image", [[float("inf"), 0.5], [0.5, 0.5]]), "0..1"),
    "pixels in five dimensions": (item("image", [[[[[1]]]]]), "shape"),
    "no pixels": (item("image", [[], []]), "no pixels"),
    "pixels of mixed kinds": (item("image", [[1, None], [{}, "a"]]), "image given as list"),
    "samples that are no numbers": (item("audio", [0.1, float("nan")] * 50), "not finite"),
    "samples of text": (item("audio", {"array": ["a"], "sampling_rate": 2000}), "audio given as dict"),
    "samples of whole numbers": (item("audio", [1, 2, 3]), "floats"),
    "samples in three dimensions": (item("audio", [[[0.1]]]), "samples must be"),
    "no samples": (item("audio", {"array": [], "sampling_rate": 2000}), "no samples"),
    "channels without samples": (item("audio", [[], []]), "no samples"),
    "a sampling rate of 0": (item("audio", {"array": [0.1], "sampling_rate": 0}), "sampling rate"),
    "a sampling rate below 0": (item("audio", {"array": [0.1], "sampling_rate": -8000}), "sampling rate"),
    "a sampling rate of text": (item("audio", {"array": [0.1], "sampling_rate": "8k"}), "sampling rate"),
    "a sampling rate of 1e18": (item("audio", {"array": [0.1], "sampling_rate": 10**18}), "sampling rate"),
    "a clip that ends before it starts": (item("audio", [0.1] * 4000, start=1.5, end=0.5), "start"),
    "a clip that starts after the end": (item("audio", [0.1] * 4000, start=99), "start"),
    "a clip that starts nowhere": (item("audio", [0.1] * 4000, start=float("nan")), "start"),
    "a clip that starts in words": (item("audio", [0.1] * 4000, start="now"), "start"),
    "frames that are missing": (item("video", ["0.png", "1.png"]), "0.png does not exist"),
    "frames at 0 per second": (item("video", [[[1, 2], [3, 4]]] * 3, fps=0), "fps"),
    "frames at NaN per second": (item("video", [[[1, 2], [3, 4]]] * 3, fps=float("nan")), "fps"),
    "frames at some rate": (item("video", [[[1, 2], [3, 4]]] * 3, fps="some"), "fps"),
    "frames of text": (item("video", [[["a"]]]), "frame 0"),
}


# Lines


def raw_line(text: bytes | str) -> Write:
    return lambda folder: write_lines(folder, GOOD, text.encode() if isinstance(text, str) else text)


LINES: dict[str, tuple[Write, str]] = {
    "half a character in a text": (raw_line('{"text": "a \\ud800 b"}'), "lone surrogate"),
    "the other half of a character": (raw_line('{"text": "a \\uDFFF b"}'), "lone surrogate"),
    "half a character in a message": (raw_line(json.dumps(chat("a \ud83d b"))), "lone surrogate"),
    "half a character in a role": (raw_line('{"messages": [{"role": "\\udc00", "content": "a"}]}'), "lone surrogate"),
    "half a character in a key": (raw_line('{"text": "a", "\\ud800": 1}'), "lone surrogate"),
    "half a character in raw bytes": (raw_line(b'{"text": "\xed\xa0\x80"}'), "UTF-8"),
    "arrays 100,000 deep": (raw_line('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}"), "too deeply"),
    "objects 100,000 deep": (raw_line('{"a": ' * 100_000 + "1" + "}" * 100_000), "too deeply"),
    "arrays that never close": (raw_line("[" * 100_000), "too deeply"),
    "a number of 5000 digits": (raw_line('{"text": "a", "n": ' + "9" * 5000 + "}"), "not valid JSON"),
    "a key twice": (raw_line('{"text": "a", "text": "b"}'), "twice"),
    "a key of a message twice": (
        raw_line('{"messages": [{"role": "user", "role": "assistant", "content": "a"}]}'), "'role' twice"
    ),
    "bytes that are not UTF-8": (raw_line(b'{"text": "\xff\xfe"}'), "UTF-8"),
    "a line cut in a character": (raw_line('{"text": "é"}'.encode()[:11]), "UTF-8"),
    "a line that is cut": (raw_line('{"text": "abc'), "not valid JSON"),
    "a list": (raw_line("[1, 2]"), "JSON object"),
    "a number": (raw_line("7"), "JSON object"),
    "null": (raw_line("null"), "JSON object"),
    "two objects in a line": (raw_line('{"text": "a"} {"text": "b"}'), "not valid JSON"),
    "single quotes": (raw_line("{'text': 'a'}"), "not valid JSON"),
    "a text in UTF-16": (raw_line('{"text": "a"}'.encode("utf-16")), "not valid JSON"),
    "zero bytes": (raw_line(bytes(100)), "not valid JSON"),
    "a text of a number": (raw_line('{"text": NaN}'), "text"),
}  # fmt: skip
GOOD_LINES: dict[str, Write] = {
    "a zero character in a text": raw_line(json.dumps({"text": "a\0b"})),
    "a whole pair of surrogates": raw_line('{"text": "a \\ud83d\\ude00 b"}'),
    "a mark of byte order first": lambda folder: write_lines(folder, b"\xef\xbb\xbf" + lines(GOOD)),
    "ends of lines as Windows has them": lambda folder: write_lines(folder, *[lines(GOOD)[:-1] + b"\r"] * 3),
}


# Files


def jsonl_of(data: bytes, name: str = "rows.jsonl") -> Write:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return write


def parquet(change: Callable[[bytes], bytes] = bytes, table: Any = None, **options: Any) -> Write:
    def write(folder: Path) -> Path:
        texts = {"text": [f"row {i}" for i in range(200)], "id": list(range(200))}
        file = io.BytesIO()
        pyarrow.parquet.write_table(table or pyarrow.table(texts), file, row_group_size=50, **options)
        (folder / "rows.parquet").write_bytes(change(file.getvalue()))
        return folder / "rows.parquet"

    return write


def flipped(at: int, length: int = 20) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes(byte ^ 0xFF for byte in data[at : at + length]) + data[at + length :]


def tar(members: list[tuple[str, bytes]], change: Callable[[bytes], bytes] = bytes, **info: Any) -> Write:
    """`info` goes to the last member."""

    def write(folder: Path) -> Path:
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as archive:
            for number, (name, data) in enumerate(members):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                if number == len(members) - 1:
                    for key, value in info.items():
                        setattr(member, key, value)
                archive.addfile(member, io.BytesIO(data))
        (folder / "rows.tar").write_bytes(change(file.getvalue()))
        return folder / "rows.tar"

    return write


def header(name: str, size: bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Of a tar member, with a right checksum; `size` as it is stored."""
    made = bytearray(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT))
    made[124:136], made[156:157], made[148:156] = size, kind, b" " * 8
    made[148:156] = b"%06o\0 " % sum(made)
    return bytes(made)


TWO = [("a.txt", b"words"), ("a.png", picture("PNG")), ("b.txt", b"more words")]


def saved(damage: Callable[[Path], object]) -> Write:
    def write(folder: Path) -> Path:
        datasets.Dataset.from_list([{"text": f"row {i}"} for i in range(50)]).save_to_disk(folder / "saved")
        damage(folder / "saved")
        return folder / "saved"

    return write


def arrow_of(folder: Path) -> Path:
    return next(folder.glob("*.arrow"))


def cut_arrow(folder: Path) -> None:
    path = arrow_of(folder)
    path.write_bytes(path.read_bytes()[:300])


def flip_arrow(folder: Path) -> None:
    path = arrow_of(folder)
    path.write_bytes(flipped(8, 200)(path.read_bytes()))


def odd_source(make: Callable[[Path], object], name: str) -> Write:
    def write(folder: Path) -> Path:
        make(folder / name)
        return folder / name

    return write


def compressed(size: int | None = None) -> bytes:
    return gzip.compress(lines(*[GOOD] * 200))[:size]


two_names = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
not_utf8 = pyarrow.StringArray.from_buffers(
    1, pyarrow.py_buffer(struct.pack("<ii", 0, 2)), pyarrow.py_buffer(b"\xff\xfe")
)
FILES: dict[str, tuple[Write, tuple[str, ...]]] = {
    "a binary file named .jsonl": (jsonl_of(bytes(range(256)) * 9), ("rows.jsonl:1", "not")),
    "a compressed file named .jsonl": (jsonl_of(compressed()), ("rows.jsonl:1", "UTF-8")),
    "an empty file": (jsonl_of(b""), ("rows.jsonl", "no rows")),
    "a file of blank lines": (jsonl_of(b"\n \n\t\n"), ("rows.jsonl", "no rows")),
    "a cut gzip": (jsonl_of(compressed(60), "rows.jsonl.gz"), ("rows.jsonl.gz",)),
    "garbage named .gz": (jsonl_of(bytes(200), "rows.jsonl.gz"), ("rows.jsonl.gz",)),
    "a JSON array that is cut": (jsonl_of(b'[{"text": "a"}, {"te', "rows.json"), ("rows.json",)),
    "a CSV of zero bytes": (jsonl_of(bytes(300), "rows.csv"), ("rows.csv",)),
    "a pipe as source": (odd_source(os.mkfifo, "rows.jsonl"), ("rows.jsonl", "a pipe")),
    "a device as source": (lambda folder: Path("/dev/zero"), ("/dev/zero", "a device")),
    "a link in a circle as source": (odd_source(lambda path: path.symlink_to(path), "rows.jsonl"), ("rows.jsonl",)),
    "a name of 5000 characters as source": (lambda folder: folder / ("a" * 5000), ("data.sources.0.path",)),
    "a folder named like a file": (odd_source(Path.mkdir, "rows.jsonl"), ("rows.jsonl", "no JSONL")),
    "a Parquet file that is cut": (parquet(lambda data: data[: len(data) // 2]), ("rows.parquet", "Parquet")),
    "a Parquet file of zeros": (parquet(lambda data: bytes(len(data))), ("rows.parquet", "Parquet")),
    "a Parquet file with garbage for a footer": (
        parquet(lambda data: data[:-300] + b"\xa5" * 292 + data[-8:]), ("rows.parquet", "Parquet")
    ),
    "a Parquet footer of 4 GB": (
        parquet(lambda data: data[:-8] + b"\xff\xff\xff\x7f" + data[-4:]), ("rows.parquet", "Parquet")
    ),
    "Parquet pages with flipped bytes": (parquet(flipped(30)), ("rows.parquet row 0", "row group 0 is damaged")),
    "Parquet pages of zeros": (
        parquet(lambda data: data[:8] + bytes(200) + data[208:]), ("rows.parquet row 0", "row group 0 is damaged")
    ),
    "Parquet pages that fail their checksum": (
        parquet(flipped(60, 1), compression=None, use_dictionary=False, write_page_checksum=True),
        ("rows.parquet row 0", "row group 0 is damaged"),
    ),
    "a Parquet column that is not UTF-8": (
        parquet(table=pyarrow.Table.from_arrays([not_utf8], names=["text"])), ("rows.parquet row 0", "UTF8")
    ),
    "two Parquet columns of one name": (parquet(table=two_names), ("rows.parquet", "'text'")),
    "a Parquet date of the year 300,000": (
        parquet(table=pyarrow.table({"text": ["a"], "at": pyarrow.array([10**8], pyarrow.date32())})),
        ("rows.parquet row 0", "`at`"),
    ),
    "a tar that is cut in a member": (tar(TWO, lambda data: data[:1300]), ("rows.tar",)),
    "a tar that is cut between members": (tar(TWO, lambda data: data[:1024]), ("rows.tar", "end mark is missing")),
    "a tar that is cut in a header": (tar(TWO, lambda data: data[:1100]), ("rows.tar",)),
    "a tar with a damaged header": (tar(TWO, flipped(1024 + 100, 30)), ("rows.tar", "header")),
    "two tars joined": (tar(TWO, lambda data: data * 2), ("rows.tar", "follows the end mark")),
    "a tar that is compressed": (tar(TWO, gzip.compress), ("rows.tar", "compression")),
    "a tar of zeros and a byte": (jsonl_of(bytes(10000) + b"x", "rows.tar"), ("rows.tar",)),
    "text named .tar": (jsonl_of(b"not a tar " * 200, "rows.tar"), ("rows.tar",)),
    "a tar with a link": (
        tar([*TWO, ("b.png", b"")], type=tarfile.SYMTYPE, linkname="/etc/passwd"), ("rows.tar sample b", "link")
    ),
    "a tar with a hard link": (
        tar([*TWO, ("b.png", b"")], type=tarfile.LNKTYPE, linkname="a.png"), ("rows.tar sample b", "link")
    ),
    "a tar with a member twice": (tar([*TWO, ("b.txt", b"other")]), ("rows.tar sample b", "twice")),
    "a tar with a device": (tar([*TWO, ("b.png", b"")], type=tarfile.CHRTYPE), ("rows.tar sample b", "plain file")),
    "a tar member of negative size": (
        jsonl_of(header("a.txt", b"\xff" * 11 + b"\0") + bytes(2048), "rows.tar"), ("rows.tar",)
    ),
    "a tar member larger than the file": (
        jsonl_of(header("a.txt", b"77777777777\0") + bytes(2048), "rows.tar"), ("rows.tar",)
    ),
    "a pax header larger than the file": (
        jsonl_of(header("a.txt", b"77777777777\0", b"x") + bytes(2048), "rows.tar"), ("rows.tar",)
    ),
    "a pax header of negative size": (
        jsonl_of(header("a.txt", b"\xff" * 11 + b"\0", b"x") + bytes(2048), "rows.tar"), ("rows.tar",)
    ),
    "a tar sample with a cut picture": (
        tar([("a.txt", b"words"), ("a.png", picture("PNG")[:60])]), ("rows.tar sample a", "image given as bytes")
    ),
    "a saved dataset without its files": (
        saved(lambda folder: arrow_of(folder).unlink()), ("saved", "failed to load")
    ),
    "a saved dataset with a cut file": (saved(cut_arrow), ("saved",)),
    "a saved dataset with flipped bytes": (saved(flip_arrow), ("saved",)),
    "a saved dataset with garbage for state": (
        saved(lambda folder: (folder / "state.json").write_bytes(b"\xff{")), ("saved", "failed to load")
    ),
    "a saved dataset with a list for state": (
        saved(lambda folder: (folder / "state.json").write_text("[]")), ("saved", "failed to load")
    ),
    "a saved dataset with garbage for features": (
        saved(lambda folder: (folder / "dataset_info.json").write_text('{"features": {"text": 7}}')), ("saved",)
    ),
}  # fmt: skip


# Templates

DOUBLES = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
NESTS = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}"
SQUARES = "{% set ns = namespace(n=9) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n > 1 }}"
IF_BOMB = "{% if 'bomb' in messages[0].content %}"
TEMPLATES: dict[str, tuple[str, str]] = {
    "loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "model.tokenizer"),
    "a loop that a condition empties": (
        "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}", "CPU time"
    ),
    "macros that call each other twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "CPU time"
    ),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "a text that doubles": (DOUBLES, "memory"),
    "lists that double": (NESTS, "the chat template"),
    "numbers that square": (SQUARES, "CPU time"),
    "a power without end": ("{{ 9 ** (9 ** 9) }}", "the chat template"),
    "a text of 10 GB": ("{{ 'a' * 10000000000 }}", "memory"),
    "a text of 100 MB": ("{{ 'a' * 100000000 }}", "characters"),
    "a column of 10 GB": ("{{ '%10000000000d' % 1 }}", "the chat template"),
    "a range too long": ("{% for a in range(10 ** 12) %}{% endfor %}", "Range too big"),
    "a division by zero": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "a syntax error": ("{% for %}", "invalid"),
    "an unknown filter": ("{{ messages | frobnicate }}", "invalid"),
    "a tag that stays open": ("{% if true %}", "invalid"),
    "a file to include": ("{% include '/etc/passwd' %}", "the chat template"),
    "a way out of the sandbox": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "the chat template"),
    "an exception of its own": ("{{ raise_exception('no ' * 3) }}", "no no no"),
    "something undefined": ("{{ messages[99].content.upper() }}", "the chat template"),
    "brackets 5000 deep": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "the chat template"),
    "no text at all": ("{% if false %}{% endif %}", "rows.jsonl:1"),
}  # fmt: skip


def template_cases() -> Iterator[Case]:
    write = partial(write_lines)
    for name, (template, says) in TEMPLATES.items():
        yield Case(f"template: {name}", partial(inspected, write=lambda f: write(f, GOOD), template=template), (says,))
    for name in ("loops", "a text that doubles", "a macro that calls itself", "a division by zero"):
        template = IF_BOMB + TEMPLATES[name][0] + "{% endif %}" + CHATML
        yield Case(
            f"template: {name}, for one row", partial(inspected, write=bomb_row, template=template), ("rows.jsonl:2",)
        )
        skipping = partial(inspected, write=bomb_row, template=template, on_bad_row="skip")
        yield Case(f"template: {name}, for one row, skipped", skipping, (), lists_row_2)


def bomb_row(folder: Path) -> Path:
    return write_lines(folder, GOOD, chat("a bomb"), GOOD)


def lists_row_2(folder: Path, result: Result) -> str | None:
    return None if "rows.jsonl:2:" in result.stdout.replace("\n", "") else "row 2 is not listed"


def cases() -> Iterator[Case]:
    yield from media_cases()
    for title, (write, reason) in VALUES.items():
        yield Case(title, partial(inspected, write=write), ("rows.jsonl:2", reason))
    for title, (write, reason) in LINES.items():
        yield Case(title, partial(inspected, write=write), ("rows.jsonl:2", reason))
    for title in ("half a character in a text", "arrays 100,000 deep", "bytes that are not UTF-8", "a key twice"):
        skipping = partial(inspected, write=LINES[title][0], on_bad_row="skip")
        yield Case(f"{title}, skipped", skipping, (), lists_row_2)
    for title, write in GOOD_LINES.items():
        yield Case(title, partial(inspected, write=write))
    for title, (write, says) in FILES.items():
        yield Case(title, partial(inspected, write=write), says)
    yield from template_cases()


CASES = list(cases())
