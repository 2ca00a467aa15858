"""Formats that outputs follow, and formats that any text has."""

_DATE = (
    r"(?:(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-"
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    # Leap years: four divides them, and 400 divides them if 100 does.
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_LOCAL_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?"
_TIME = _LOCAL_TIME + r"(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BASE64 = r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"
_BASE64URL = r"(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}(?:==)?|[A-Za-z0-9_-]{3}=?)?"
_INTEGER = r"-?(?:0|[1-9][0-9]*)"
_NATURAL = r"(?:0|[1-9][0-9]*)"
_UUID = "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-%s[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"

PATTERNS = {
    "base64": _BASE64,
    "base64url": _BASE64URL,
    "byte": _BASE64,
    "char": r"(?s:.)",
    "date": _DATE,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "date-time-local": f"{_DATE}[tT]{_LOCAL_TIME}",
    "decimal": rf"{_INTEGER}(?:\.[0-9]+)?",
    "int32": _INTEGER,
    "int64": _INTEGER,
    "json-pointer": "(?:/(?:[^/~]|~[01])*)*",
    "partial-date-time": f"{_DATE}[tT]{_LOCAL_TIME}",
    "time": _TIME,
    "time-local": _LOCAL_TIME,
    "uint32": _NATURAL,
    "uint64": _NATURAL,
    **{f"uuid{version}": _UUID % version for version in (1, 3, 4, 5, 6, 7, 8)},
}
"""Regular expressions of the formats that llguidance lacks, or takes less exactly: it admits 29
February in any year, the year 0000 and a leap second in any minute."""
OF_LIBRARY = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
"""Formats that llguidance enforces."""
FORMATS = OF_LIBRARY | PATTERNS.keys()
"""Formats that are enforced."""
FREE = frozenset(
    {
        "binary", "directory-path", "file-path", "multi-line", "multiline", "new-path", "password",
        "path", "string", "text", "textarea",
    }
)  # fmt: skip
"""Formats that any text has: they say what it is for, or how to show it."""
ENCODINGS = ("base64", "base64url")
"""Values of `contentEncoding` that are enforced, as the formats of these names."""
FREE_ENCODINGS = ("7bit", "8bit", "binary")
"""Values of `contentEncoding` that any text has."""
