async def run(session, row):
    messages = [{"role": "user", "content": row["question"]}]
    reply = await session.chat(messages, max_tokens=32)
    return float(str(row["answer"]) in (reply["content"] or ""))
