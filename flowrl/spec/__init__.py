"""The document: YAML with a position for every value, overlays, `$params`, and the Pydantic models of all sections.

`flowrl.spec.read.read_document` is the way in; it reports every problem of a file at once and still hands over what
is usable. Nothing here starts a process or knows a node class.
"""
