"""`forebay bench serve`: a load client for any OpenAI-compatible server.

It measures what a client sees, over HTTP alone, and knows nothing of gateways, workers or Redis.
Definitions and report lines are those of `vllm bench serve`, so that figures can be laid side by
side.

    options   what may be asked         datasets, traces   the requests and their arrival times
    sse       bytes -> events           client             one request -> one Outcome
    load      plays the requests        metrics, report    Outcomes -> figures -> text and JSON
"""
