"""Programs that measure; nothing here is a test."""
