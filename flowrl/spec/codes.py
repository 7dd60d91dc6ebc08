"""Codes of the problems that a document can have. A code never changes its meaning.

| code  | what |
|-------|------|
| FR001 | the file is missing or cannot be read |
| FR002 | YAML syntax, an empty file, a top level that is no mapping |
| FR003 | a key stands twice in one mapping |
| FR004 | a YAML feature that flowrl refuses: date, `<<`, tag, key that is no string |
| FR005 | unknown key |
| FR006 | wrong type |
| FR007 | value out of range or not allowed |
| FR008 | a required key is missing |
| FR009 | unknown node (found by the graph) |
| FR010 | unknown model (found by the graph) |
| FR011 | unknown type of data set |
| FR012 | unknown pool (found by the graph) |
| FR013 | unknown port (found by the graph) |
| FR014 | a node class that breaks the rules (found by the graph) |
| FR015 | unknown `$name` |
| FR016 | `extends` of a missing file, or in a circle |
| FR017 | bad `--set` |
| FR018 | the data of a data set: missing, a bad row, a wrong setting, too few rows |
| FR019 | a node needs a `model:` or takes none (found by the graph) |
| FR072 | a key that the chosen schedule does not use |

The graph finds FR020 to FR079 (`flowrl.graph.checks`); docs/errors.md has a page for each.
"""

UNREADABLE = "FR001"
SYNTAX = "FR002"
REPEATED_KEY = "FR003"
REFUSED_YAML = "FR004"
UNKNOWN_KEY = "FR005"
WRONG_TYPE = "FR006"
NOT_ALLOWED = "FR007"
MISSING_KEY = "FR008"
UNKNOWN_DATA = "FR011"
UNKNOWN_PARAM = "FR015"
BAD_EXTENDS = "FR016"
BAD_SET = "FR017"
UNUSED_KEY = "FR072"
