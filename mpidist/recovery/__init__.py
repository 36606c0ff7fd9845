"""Training that goes on when a rank is lost."""
