"""The peak of the fullest rank, term by term."""
