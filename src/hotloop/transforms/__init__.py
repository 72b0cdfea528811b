"""The transforms: one small file for each decision."""
