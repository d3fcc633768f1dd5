"""A dataset in the browser: `spanmill view`, and the same pages at `/` of a running `spanmill serve`."""

from spanmill.collector.view.app import view, view_routes

__all__ = ["view", "view_routes"]
