#!/usr/bin/env python3
"""Makes the golden vectors with pamqp, an AMQP codec that shares no code with this one.

    pip install pamqp==4.0.1 && python3 generate.py

Writes three files beside itself, a vector a line, fields separated by tabs:
  methods.tsv     bytes of the whole frame (hex) · the method as Rust's Debug shows it
                  (channel.open and open-ok are to be decoded only: pamqp fills their reserved fields)
  properties.tsv  bytes of the whole header frame (hex) · the properties as Rust's Debug shows them
  values.tsv      name · bytes of a table with that one field `v` (hex, with its length)
"""

import datetime
import decimal
import pathlib

from pamqp import commands, encode, frame, header

HERE = pathlib.Path(__file__).parent
CLASSES = ["Connection", "Channel", "Exchange", "Queue", "Basic", "Tx", "Confirm"]
REPLIES = {200: "SUCCESS", 404: "NOT_FOUND"}
SECRET = {("Connection", "StartOk", "response"), ("Connection", "Secure", "challenge"),
          ("Connection", "SecureOk", "response"), ("Connection", "UpdateSecret", "new_secret")}
# On the wire only.
RESERVED = {"ticket", "capabilities", "insist", "known_hosts", "out_of_band", "channel_id"}
RENAMED = {"exchange_type": "kind", "message_type": "kind", "global_": "global"}
NOON = datetime.datetime(2024, 2, 29, 12, 0, 0, tzinfo=datetime.timezone.utc)

TABLE = {
    "text": "häll\"o", "yes": True, "no": False, "nothing": None, "tiny": 7, "negative": -7,
    "short": 1000, "int": 70000, "minus": -70000, "long": 5_000_000_000, "half": 0.5,
    "money": decimal.Decimal("3.14"), "when": NOON, "bytes": bytearray(b"\x00\xff"),
    "list": ["a", 1, [True, None], {"in": "list"}], "table": {"a": {"b": {"c": "deep"}}},
}


def debug(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "void"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, decimal.Decimal):
        return f"{int(value.scaleb(2))}e-2"
    if isinstance(value, datetime.datetime):
        return f"timestamp {int(value.timestamp())}"
    if isinstance(value, bytearray):
        return 'b"' + "".join(f"\\x{octet:02x}" for octet in value) + '"'
    if isinstance(value, list):
        return "[" + ", ".join(map(debug, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{debug(k)}: {debug(v)}" for k, v in sorted(value.items())) + "}"
    raise TypeError(type(value))


def sample(kind, name, variant):
    """A value of an AMQP type: empty or zero, ordinary, the largest."""
    if kind == "bit":
        return [False, True, len(name) % 2 == 0][variant]
    if name == "reply_code":
        return [0, 200, 404][variant]
    return {
        "octet": [0, 9, 255], "short": [0, 258, 65535], "long": [0, 16909060, 4294967295],
        "longlong": [0, 72623859790382856, 9223372036854775807],
        "shortstr": ["", name, "x" * 120], "longstr": ["", name, "y" * 3000],
        "table": [{}, {"product": name, "n": 1}, TABLE],
    }[kind][variant]


def methods():
    for class_name in CLASSES:
        group = getattr(commands, class_name)
        for method_name in sorted(vars(group)):
            method = getattr(group, method_name)
            if not isinstance(method, type) or method_name == "Properties":
                continue
            seen = set()
            for variant in range(3):
                values = {}
                for name in method.attributes():
                    if name not in RESERVED and method_name != "GetEmpty":
                        values[name] = sample(method.amqp_type(name), name, variant)
                octets = frame.marshal(method(**values), 7)
                if octets in seen:
                    continue
                seen.add(octets)
                fields = []
                for name, value in values.items():
                    shown = debug(value)
                    if (class_name, method_name, name) in SECRET:
                        shown = "[hidden]"
                    if name == "reply_code":
                        shown = f"{value} {REPLIES[value]}" if value in REPLIES else str(value)
                    fields.append(f"{RENAMED.get(name, name)}: {shown}")
                body = " { " + ", ".join(fields) + " }" if fields else ""
                yield f"{octets.hex()}\t{class_name}{method_name}({method_name}{body})"


def properties():
    types = commands.Basic.Properties
    names = [name for name in types.attributes() if name != "cluster_id"]
    samples = {
        "headers": TABLE, "delivery_mode": 2, "priority": 5, "timestamp": NOON,
    }
    sets = [[], names] + [[name] for name in names] + [names[:i] for i in range(2, len(names))]
    for chosen in sets:
        values = {name: samples.get(name, f"the {name}") for name in chosen}
        octets = frame.marshal(header.ContentHeader(0, 123456789012, types(**values)), 9)
        shown = []
        for name in names + ["cluster_id"]:
            if name in values:
                value = values[name]
                text = str(int(value.timestamp())) if name == "timestamp" else debug(value)
                text = f"Some({text})"
            else:
                text = "None"
            shown.append(f"{RENAMED.get(name, name)}: {text}")
        yield f"{octets.hex()}\tProperties {{ {', '.join(shown)} }}"


def values():
    raw = {
        "true": b"t" + encode.boolean(True), "text": b"S" + encode.long_string("häll"),
        "bytes": b"x" + encode.byte_array(bytearray(b"\x00\xff")),
        "decimal": b"D" + encode.decimal(decimal.Decimal("3.14")),
        "double": b"d" + encode.double(-0.5), "float": b"f" + encode.floating_point(0.25),
        "u8": b"B" + encode.octet(200), "i16": b"s" + encode.short_int(-2),
        "u16": b"u" + encode.short_uint(65000), "i32": b"I" + encode.long_int(-3),
        "u32": b"i" + encode.long_uint(4_000_000_000), "i64": b"l" + encode.long_long_int(-4),
        "timestamp": b"T" + encode.timestamp(NOON), "void": b"V",
        "array": b"A" + encode.field_array([True, "a"]),
        "table": b"F" + encode.field_table({"k": "v"}),
    }
    for name, octets in raw.items():
        field = encode.short_string("v") + octets
        yield f"{name}\t{(encode.long_uint(len(field)) + field).hex()}"


for name, lines in [("methods", methods()), ("properties", properties()), ("values", values())]:
    lines = list(lines)
    (HERE / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    print(f"{name}: {len(lines)} vectors")
