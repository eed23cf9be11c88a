"""Who and where this rank is, how ranks meet, and how a local job is launched."""
