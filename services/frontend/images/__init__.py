"""Images of requests: reading files and URLs safely, and turning pictures into patches."""
