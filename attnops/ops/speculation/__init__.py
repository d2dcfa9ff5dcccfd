"""A round of speculation: drafts, and which of them the target model accepts."""
