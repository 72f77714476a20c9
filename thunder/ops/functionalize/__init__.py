"""In-place operations and views as functional operations: a written tensor stands for another value."""
