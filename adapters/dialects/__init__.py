"""Readers, one small file per dialect, in one list."""
