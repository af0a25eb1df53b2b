"""Files of requests, one a line, and the files of records that answer them. Layer 8.

Input lines are OpenAI's batch requests, simple objects or plain text; a record is OpenAI's. Knows `api` and
nothing of what lies behind it, and neither terminals nor HTTP.
"""
