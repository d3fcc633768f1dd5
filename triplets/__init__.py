"""Records, column spec, Parquet writer and reader: the right end of the flow."""
