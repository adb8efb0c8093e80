"""Get answers of a given shape: one of several words, a pattern, a grammar's sentence, JSON under a schema.

python examples/scripts/structured_output.py        (needs pip install nbengine[structured])
"""

from __future__ import annotations

import enum

from pydantic import BaseModel, Field

from nbengine import LLM, SamplingParams, StructuredOutputsParams


class CarType(enum.StrEnum):
    """The kinds of car."""

    SEDAN = "sedan"
    SUV = "SUV"
    COUPE = "coupe"


class Car(BaseModel):
    """The fields that the model is to fill in."""

    brand: str = Field(max_length=20)
    model: str = Field(max_length=20)
    car_type: CarType
    year: int = Field(ge=1950, le=2030)


SQL = """
root ::= "SELECT " columns " FROM " table (" WHERE " column " = " number)?
columns ::= column (", " column)*
column ::= "name" | "age" | "city"
table ::= "users" | "orders"
number ::= [0-9]{1,3}
"""

QUESTIONS = [
    (
        "Is this sentence positive or negative? I love this engine!",
        StructuredOutputsParams(choice=["Positive", "Negative"]),
    ),
    (
        "Give an email address for Alan Turing, who works at Enigma.",
        StructuredOutputsParams(regex=r"[a-z]{2,12}(\.[a-z]{2,12})?@[a-z]{2,12}\.com"),
    ),
    ("Write an SQL query for the names and ages of all users.", StructuredOutputsParams(grammar=SQL)),
    (
        "Describe the most famous car of the 1990s as JSON with brand, model, car_type and year.",
        StructuredOutputsParams(json=Car, disable_any_whitespace=True),
    ),
]


def main() -> None:
    """Print each question with its answer; all are answered in one batch."""
    llm = LLM(model="smollm2-135m", max_model_len=1024)
    conversations = [[{"role": "user", "content": question}] for question, _ in QUESTIONS]
    params = [
        SamplingParams(temperature=0, max_tokens=100, structured_outputs=constraint)
        for _, constraint in QUESTIONS
    ]
    outputs = llm.chat(conversations, params)
    for (question, constraint), output in zip(QUESTIONS, outputs, strict=True):
        kind, _ = constraint.constraint
        text = output.outputs[0].text
        print(f"{question} [{kind}]")
        print(text)
        if kind == "json":
            print(repr(Car.model_validate_json(text)))


if __name__ == "__main__":
    main()
