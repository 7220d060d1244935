"""All that runs inside a vLLM process: the recorder and its hooks, the server, the patch series and its tool."""
