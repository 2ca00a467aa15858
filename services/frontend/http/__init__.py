"""The HTTP edge of the frontend, in the form of OpenAI's API: schema, answers, errors, server."""
