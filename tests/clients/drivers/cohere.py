"""Cohere's own client, for rankings."""

import cohere

from tests.clients.trial import Report, check, served, serving

QUERY = "Which bird is red?"
TEXTS = ["a red bird", "Once upon a time there was a house.", "x"]


def main() -> None:
    report = Report("cohere")
    _, model = served()
    with report.trial("ClientV2.rerank"):
        client = cohere.ClientV2(api_key="none", base_url=serving("score"))
        ranking = client.rerank(model=model, query=QUERY, documents=TEXTS).results
        check(sorted(each.index for each in ranking) == [0, 1, 2], ranking)
        scores = [each.relevance_score for each in ranking]
        check(scores == sorted(scores, reverse=True), ranking)
    with report.trial("ClientV2.rerank: top_n, max_tokens_per_doc"):
        [best] = client.rerank(
            model=model, query=QUERY, documents=TEXTS, top_n=1, max_tokens_per_doc=4
        ).results
        check(0 <= best.index < 3, best)
    with report.trial("Client.rerank, with documents returned"):
        client = cohere.Client(api_key="none", base_url=serving("score"))
        wish = {"model": model, "query": QUERY, "return_documents": True}
        for documents in (TEXTS, [{"text": each} for each in TEXTS]):
            ranking = client.rerank(documents=documents, **wish).results
            check(all(each.document.text == TEXTS[each.index] for each in ranking), ranking)
    report.print()


if __name__ == "__main__":
    main()
