"""Openings of user turns by kind of task, for a target that asks itself.

A model that is left alone at the bare chat header asks a narrow kind of question. An
opening fixes the kind of task and a topic and lets the model write the rest of the turn
(the e-mail to summarise, the function to complete), so that the answers that a drafter
learns from cover what people really send. Closed openings are whole prompts already.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TOPICS = (
    *("a village bakery", "a night train", "an apple orchard", "a chess club", "a flooded cellar"),
    *("a wind farm", "a city library", "a beekeeper", "a broken dishwasher", "a school trip"),
    *("solar panels", "a bicycle repair shop", "a coral reef", "a mountain hut", "a tax return"),
    *("a youth orchestra", "a data centre", "a lost suitcase", "a community garden", "a dental practice"),
    *("a food truck", "a museum of clocks", "a ferry timetable", "a job interview", "a puppy"),
    *("a marathon", "a new roof", "an online course", "a hospital ward", "a street market"),
    *("a software release", "a fishing harbour", "a wedding", "a parking fine", "a warehouse"),
    *("a volcano", "a power cut", "a translation agency", "a hotel booking", "a lighthouse"),
    *("an electric car", "a vaccine study", "a rental flat", "a football team", "a customer complaint"),
    *("a budget meeting", "a science fair", "a vegetable soup", "a broken phone", "a film festival"),
    *("a security audit", "a water bill", "a space probe", "a carpenter", "a radio station"),
    *("a language exchange", "a fitness app", "a delivery delay", "a forest fire", "a family reunion"),
    *("a coffee roaster", "a court hearing", "a bus strike", "a piano teacher", "a moving company"),
    *("a dairy farm", "a password reset", "a swimming pool", "a glacier", "a book club", "an airport"),
    *("a theatre rehearsal", "a recycling plant", "a mortgage", "a game jam", "a snowstorm"),
    *("a nursing home", "a printing error", "a pharmacy", "a startup", "an insurance claim"),
    *("a bridge inspection", "a robot vacuum", "a choir"),
)
NAMES = (
    *("Anna", "Bilal", "Chen", "Diego", "Elif", "Farah", "George", "Hanna", "Ivan", "Jade", "Kofi"),
    *("Lena", "Mateo", "Nadia", "Oskar", "Priya", "Quinn", "Rosa", "Sven", "Tariq", "Uma", "Viktor"),
    *("Wanda", "Yuki"),
)
DOCUMENTS = (
    *("e-mail", "memo", "news report", "meeting note", "letter", "product review", "article"),
    *("announcement", "support ticket", "paragraph", "contract clause", "travel blog post"),
    *("press release", "chat message"),
)
LANGUAGES = (
    "Python",
    "Python",
    "Python",
    "JavaScript",
    "SQL",
    "Java",
    "C",
    "Bash",
    "HTML",
    "Go",
    "TypeScript",
)
FIELDS = (
    *("name, date and amount", "title, place and time", "sender, product and quantity"),
    *("city and temperature", "first name, surname and phone", "order number and price"),
    *("author, year and publisher", "id and status", "ingredients and minutes"),
    *("event, day and organiser", "model, colour and size", "from, to and departure"),
)
FUNCTIONS = (
    *("counts the words of a text", "returns the largest of three numbers", "reverses a list"),
    *("reads a CSV file", "checks whether a number is prime", "converts Celsius to Fahrenheit"),
    *("removes duplicates from a list", "computes the factorial of n", "sorts dictionaries by a key"),
    *("validates an e-mail address", "merges two sorted lists", "sums the digits of a number"),
    *("finds the longest word", "parses a date string", "computes the average of a column"),
    *("flattens a nested list", "counts vowels", "formats a price", "generates a random password"),
    *("finds common elements of two lists", "checks for a palindrome"),
    *("reads a JSON file and prints its keys", "groups records by month", "pads a string"),
    *("computes a checksum",),
)
NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "ten")
FORMS = (
    "a numbered list",
    "bullet points",
    "one paragraph",
    "a short table",
    "plain sentences",
    "one line each",
)

# First words of a document to work on; without them the model often ends the turn at once.
STARTS = (
    *("Dear {name}, ", "Hi {name}, ", "On Monday, ", "The ", "Last week {name} ", "Our team ", "In 2023, "),
    *(
        "{name} and {name2} ",
        "We are writing about {topic}. ",
        "This {document} is about {topic}. ",
        "At 9:15 ",
    ),
    *("Subject: ", "It was {name} who ", "There are {number} ", "Customer: ", "Please note that "),
)

# `{...}` is filled from the lists above; the first text of a pair says whether the model goes on writing.
OPENINGS: dict[str, tuple[tuple[str, str], ...]] = {
    "summarisation": (
        ("open", "Summarise the following {document} in {number} sentences.\n\n"),
        ("open", "Summarize this {document} about {topic} in one sentence:\n\n"),
        ("open", "Give me the main points of this {document} as {form}.\n\n"),
        ("open", "What is this {document} about {topic} saying? Keep it short.\n\n"),
        ("open", "Write a headline of at most {number} words for this {document}:\n\n"),
        ("open", "Shorten the text below to {number} bullet points and keep all figures.\n\n"),
        ("open", "TL;DR of this {document} from {name}, please.\n\nHi all, "),
        (
            "open",
            "Condense these minutes into {form}.\n\nMeeting about {topic}, present: {name}, {name2}. ",
        ),
        ("open", "Rewrite this {document} so that it is half as long.\n\n"),
    ),
    "extraction": (
        ("open", "List all names, dates and amounts in this {document}.\n\n"),
        ("open", "Extract the {fields} from the text below. Reply with nothing else.\n\n"),
        ("open", "Which phone numbers and addresses does this {document} mention?\n\nDear {name}, "),
        ("open", "Find every deadline in this {document} about {topic} and copy it word for word.\n\n"),
        ("open", "From the following {document}, quote the sentence about the price.\n\n"),
        ("open", "Pull out the action items and who is responsible, as {form}.\n\n{name} said that "),
        ("open", "What is the order number in this message? Answer with the number only.\n\nHello {name}, "),
        ("open", "Copy all the questions from the {document} below into {form}.\n\nHi {name}, "),
        ("open", "Who, when and where? Take the answers from this text:\n\n"),
    ),
    "structured_output": (
        ("open", "Return JSON with the keys {fields} for this {document}. JSON only.\n\n"),
        ("open", "Convert the following into a JSON array of objects with {fields}:\n\n"),
        ("open", "Turn this {document} into YAML with {fields}.\n\n"),
        ("closed", "Write a JSON object that describes {topic}, with {fields}. Output JSON only."),
        ("closed", "Give me {number} example records as CSV with a header: {fields}."),
        ("closed", "Make a Markdown table about {topic} with {number} rows and the columns {fields}."),
        ("open", "Fill this JSON template from the {document} and output only JSON.\n\n"),
        ("closed", "Write an XML snippet for {topic} with elements for {fields}."),
        ("closed", "Create a JSON list of {number} items for {topic}; each has {fields}."),
    ),
    "code_completion": (
        ("open", "Complete this {language} function that {function}:\n\n"),
        ("open", "Complete the function.\n\ndef "),
        ("open", "What does this code do, and is there a mistake in it?\n\ndef "),
        ("open", "Add comments to this {language} code. Return the whole code.\n\n"),
        ("closed", "Write a {language} function that {function}."),
        ("closed", "Write a {language} function that {function}, with a docstring and one example."),
        ("open", "Rename the variables in this code so that they say what they hold:\n\n"),
        ("open", "Fix the bug in this {language} code:\n\n"),
        ("open", "Write a unit test for this function.\n\ndef "),
        ("open", "import "),
        ("closed", "Write a {language} class for {topic} with a constructor and two methods."),
    ),
    "question_answering": (
        ("closed", "What should I know about {topic}? Answer in {number} sentences."),
        ("open", "How many "),
        ("open", "Why "),
        ("open", "What is the difference between "),
        ("open", "Explain to a child "),
        ("open", "If {name} has {number} "),
        ("open", "True or false: "),
        ("open", "Answer with one word. "),
        ("open", "{name} buys {number} "),
        ("closed", "Explain step by step how {topic} works."),
        ("open", "Use the text to answer the question.\n\nText: "),
        ("open", "Which country "),
        ("closed", "What are the advantages and disadvantages of {topic}?"),
    ),
    "dialogue": (
        ("open", "Hi! I have a problem with {topic}. "),
        ("open", "Can you help me plan "),
        ("open", "I'm {name} and I would like to "),
        ("open", "My colleague {name} says that "),
        ("closed", "Write a polite reply to {name}, who complained about {topic}."),
        ("open", "Please answer this e-mail for me.\n\nDear {name}, "),
        ("closed", "Write an e-mail to {name} about {topic} and ask for an appointment."),
        ("closed", "Write a short dialogue between {name} and {name2} about {topic}."),
        ("open", "Thank you, that helps. One more thing: "),
        ("closed", "I'm nervous because of {topic}. What can I do?"),
    ),
    "creative_writing": (
        ("closed", "Write a short story about {topic} in which {name} makes a discovery."),
        ("closed", "Write a poem about {topic}."),
        ("closed", "Write a haiku about {topic}."),
        ("closed", "Tell a story in one paragraph that begins at {topic} and ends with {name} laughing."),
        ("open", "Continue this story:\n\n"),
        ("closed", "Describe {topic} at dawn in about {number} sentences."),
        ("closed", "Write a letter from {name} to {name2} about {topic}."),
        ("closed", "Write a limerick about {name} and {topic}."),
        ("open", "Write a scene in which "),
        ("closed", "Write the opening of a mystery novel set around {topic}."),
    ),
    "brainstorming": (
        ("closed", "Give me {number} ideas for {topic}, as {form}."),
        ("closed", "Suggest {number} names for {topic}."),
        ("closed", "List {number} unusual uses for things found at {topic}."),
        ("closed", "What could go wrong with {topic}? Name {number} risks."),
        ("closed", "Come up with {number} slogans for {topic}."),
        ("open", "Suggest {number} ways to "),
        ("closed", "Which {number} questions should I ask about {topic}?"),
        ("closed", "Propose {number} activities around {topic} for children, one line each."),
        ("open", "Brainstorm "),
        ("closed", "Give {number} tips for dealing with {topic}."),
    ),
}


_WITH_DOCUMENT = ("summarisation", "extraction", "structured_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The beginning of a user turn; `closed`: nothing is to be added."""

    task: str
    text: str
    closed: bool


def draw_opening(rng: np.random.Generator) -> Opening:
    """An opening of a uniformly drawn kind of task."""

    def one(values: tuple[str, ...]) -> str:
        return values[int(rng.integers(len(values)))]

    task = one(tuple(OPENINGS))
    templates = OPENINGS[task]
    kind, template = templates[int(rng.integers(len(templates)))]
    if kind == "open" and template.endswith("\n\n") and task in _WITH_DOCUMENT:
        template += one(STARTS)
    text = template.format(
        topic=one(TOPICS),
        name=one(NAMES),
        name2=one(NAMES),
        document=one(DOCUMENTS),
        language=one(LANGUAGES),
        fields=one(FIELDS),
        function=one(FUNCTIONS),
        number=one(NUMBERS),
        form=one(FORMS),
    )
    # A tokenizer joins a space to the word after it, so the model must write the space itself.
    return Opening(task=task, text=text.rstrip(" "), closed=kind == "closed")
