"""Receiving: OTLP in, journal, index, assembling; spans out."""
