"""Pure code from spans to rows: dialects, identity, checks, order, merge, rewards."""
