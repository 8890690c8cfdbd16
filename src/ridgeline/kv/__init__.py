"""The paged cache: blocks, tables, tensors."""
