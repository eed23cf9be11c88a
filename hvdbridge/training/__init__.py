"""The training API: synchronizers, communication hooks and primitives."""
