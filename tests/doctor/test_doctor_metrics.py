from spanmill.doctor.metrics import examine_metrics

HEALTHY = """# HELP spanmill_disk_free_bytes x
spanmill_ready 1.0
spanmill_refusing 0.0
spanmill_disk_free_bytes 6.3e+010
spanmill_journal_lag_bytes 0.0
spanmill_requests_rejected_total{reason="malformed"} 0.0
spanmill_quarantined_total{reason="bad_token_id"} 0.0
spanmill_forward_requests_total{result="dropped_full"} 0.0
spanmill_forward_requests_total{result="retried"} 7.0
"""


def levels(text: str) -> list[str]:
    """The levels of what is found in figures."""
    return [finding.level for finding in examine_metrics(text)]


def test_a_healthy_service() -> None:
    """Its disk is told, and nothing else."""
    assert [("ok", "its disk has 58.7 GiB left")] == [(f.level, f.text) for f in examine_metrics(HEALTHY)]


def test_what_figures_tell() -> None:
    """Low disk, lag, refused and forwarded requests, quarantine and several workers are each a warning."""
    for old, new in (
        ("6.3e+010", "1e+09"),
        ("spanmill_refusing 0.0", "spanmill_refusing 1.0"),
    ):
        assert ["warning"] == levels(HEALTHY.replace(old, new))
    for old, new in (
        ("lag_bytes 0.0", "lag_bytes 2e+09"),
        ('"malformed"} 0.0', '"malformed"} 2.0'),
        ('"bad_token_id"} 0.0', '"bad_token_id"} 2.0'),
        ('"dropped_full"} 0.0', '"dropped_full"} 2.0'),
        ("spanmill_ready 1.0", "spanmill_ready 1.0\nspanmill_workers 4.0"),
    ):
        assert ["ok", "warning"] == levels(HEALTHY.replace(old, new))


def test_figures_of_something_else() -> None:
    """Text that has no figures of ours says nothing."""
    assert [] == levels("<html>spanmill_ready</html>\nother 1\n")
