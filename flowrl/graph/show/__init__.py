"""A plan for people and for tools: pictures, the page, the dry run as text and as data."""
