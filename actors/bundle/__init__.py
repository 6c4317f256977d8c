"""The demo's corpus, questions, tokenizer and first policy; DATA_CARD.md says where from."""
