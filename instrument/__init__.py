"""Emitting spans from inside agents and engines. Imports neither grpc, polars nor pyarrow."""
