"""A configuration's file as plain data, whichever library's it is. Nothing that a file names is run.

Terrazzo's own configuration (`config`), those of other libraries (`dialects`) and the integrations read files by this,
and what is written for people to edit is written by it.

files        a file of any format: read, refused or parsed
shell        arguments of the one program that a shell script starts: read and written
json_text    JSON: read, also with comments, and written
yaml_text    YAML of plain values: read, its comments too, and written
toml_text    TOML: read
dotted_keys  keys such as `train.steps`, taken apart and put together
limits       how deep, how many and how large

Open to other packages:

    dotted_keys  as above
"""

from typing import TYPE_CHECKING

from terrazzo.lazy import lazily

if TYPE_CHECKING:
    from terrazzo.documents.files import Format, Loaded, format_of, load, parse, parse_value, read_text
    from terrazzo.documents.json_text import write_json
    from terrazzo.documents.limits import MAX_BYTES, MAX_DEPTH
    from terrazzo.documents.shell.arguments import parse_arguments, write_arguments
    from terrazzo.documents.yaml_text import PARSER, IsText, comments, write_yaml
else:
    __getattr__, __dir__ = lazily(__name__)

__all__ = [
    "MAX_BYTES",
    "MAX_DEPTH",
    "PARSER",
    "Format",
    "IsText",
    "Loaded",
    "comments",
    "format_of",
    "load",
    "parse",
    "parse_arguments",
    "parse_value",
    "read_text",
    "write_arguments",
    "write_json",
    "write_yaml",
]
