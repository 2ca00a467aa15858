"""LangChain's class for rankings in Cohere's form."""

import cohere
from langchain_cohere import CohereRerank
from langchain_core.documents import Document

from tests.clients.trial import Report, check, served, serving

QUERY = "Which bird is red?"
TEXTS = ["a red bird", "Once upon a time there was a house.", "x"]


def main() -> None:
    report = Report("langchain-cohere")
    _, model = served()
    client = cohere.ClientV2(api_key="none", base_url=serving("score"))
    with report.trial("CohereRerank: rerank, compress_documents"):
        ranker = CohereRerank(client=client, model=model, top_n=2)
        ranking = ranker.rerank(TEXTS, QUERY)
        check(len(ranking) == 2, ranking)
        found = ranker.compress_documents([Document(page_content=each) for each in TEXTS], QUERY)
        texts = [each.page_content for each in found]
        check(texts == [TEXTS[each["index"]] for each in ranking], found)
        check(found[0].metadata["relevance_score"] == ranking[0]["relevance_score"], found)
    with report.trial("CohereRerank with base_url"):
        ranker = CohereRerank(cohere_api_key="none", base_url=serving("score"), model=model)
        check(len(ranker.rerank(TEXTS, QUERY, max_tokens_per_doc=4)) == 3, "another number")
    report.print()


if __name__ == "__main__":
    main()
