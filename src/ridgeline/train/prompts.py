"""Prompts for distillation: some two thousand requests of many kinds, written for this project.

Tasks times subjects, so that a head learns how its target writes and not what it once said.
"""

from __future__ import annotations

from ridgeline.train import materials

_SUBJECTS = (
    *("the water cycle", "bread baking", "volcanoes", "the history of writing", "honey bees"),
    *("electric motors", "vaccines", "the night sky", "coral reefs", "chess openings"),
    *("railway signals", "the human heart", "maps and projections", "composting", "sailing knots"),
    *("public libraries", "glaciers", "the invention of paper", "solar panels", "choirs"),
    *("time zones", "bridges", "tea", "owls", "earthquakes", "bicycles", "the Roman calendar"),
    *("camera lenses", "wool", "tides", "town planning", "first aid", "satellites", "dictionaries"),
    *("mushrooms", "clocks", "rice farming", "lighthouses", "recycling glass", "sleep"),
)
_TASKS = (
    "Explain {} to a ten-year-old in a few sentences.",
    "Write a short paragraph about {}.",
    "List five interesting facts about {}.",
    "What are common misunderstandings about {}?",
    "Write three quiz questions with answers about {}.",
    "Give me a step-by-step plan to learn about {} in one week.",
    "Write a friendly email inviting colleagues to a talk on {}.",
    "Compare {} today with a hundred years ago.",
    "Summarise what matters most about {} as bullet points.",
    "Write a short dialogue between a teacher and a pupil about {}.",
    "Answer as JSON with the keys title, summary and keywords: an entry about {}.",
)
_FUNCTIONS = (
    *(
        "reverses the words of a sentence",
        "counts the vowels in a string",
        "merges two sorted lists",
    ),
    *("checks whether a number is prime", "finds the longest common prefix of several strings"),
    *(
        "converts a temperature from Celsius to Fahrenheit",
        "removes duplicates but keeps the order",
    ),
    *(
        "computes the factorial of n",
        "reads a CSV file and sums one column",
        "flattens nested lists",
    ),
    *("validates an email address", "sorts a list of dictionaries by a key", "rotates a matrix"),
    *("groups words by their first letter", "finds the two numbers in a list that sum to a target"),
    *("counts how often each word occurs in a text", "computes a moving average", "parses a date"),
    *("finds the median of a list", "checks whether brackets are balanced", "shortens a long URL"),
    *("implements a stack with push and pop", "implements binary search", "implements a queue"),
    *("downloads a page and returns its title", "renames all files in a folder", "rolls two dice"),
)
_LANGUAGES = ("Python", "JavaScript", "Java", "C++", "Go", "Rust")
_CODE = (
    "Write a {1} function that {0}.",
    "Write a {1} function that {0}, with comments, and show how to call it.",
    "Write unit tests in {1} for a function that {0}.",
)
_SUMS = (
    "A shop sells {a} apples at {b} cents each and {c} pears at {d} cents each. What is the total? "
    "Show your steps.",
    "A train travels {a} km in {b} minutes. How far does it travel in {c} minutes at that speed?",
    "What is {a} plus {b} times {c}? Explain the order of operations.",
    "{a} children share {c} sweets equally. How many does each get and how many are left?",
    "A rectangle is {a} cm long and {b} cm wide. Compute its area and its perimeter.",
    "Solve for x: {a}x + {b} = {c}. Show each step.",
)
_MORE = (
    "Write a limerick about {}.",
    "Write a story of about 150 words that begins with {}.",
    "Translate into French: I would like to know more about {}.",
    "Translate into Spanish: My sister wrote a book about {}.",
    "Rewrite this more politely: Stop asking me about {}.",
    "Suggest five titles for an article on {}.",
)


def default_prompts() -> list[str]:
    """The prompts, in a fixed order that mixes their kinds."""
    kinds = [
        [task.format(subject) for task in _TASKS for subject in _SUBJECTS],
        [
            task.format(function, language)
            for k, function in enumerate(_FUNCTIONS)
            for task in _CODE
            for language in (_LANGUAGES[0], _LANGUAGES[1 + k % (len(_LANGUAGES) - 1)])
        ],
        [
            task.format(a=7 + 3 * i, b=4 + 5 * i, c=20 + 7 * i, d=9 + 2 * i)
            for task in _SUMS
            for i in range(16)
        ],
        [task.format(subject) for task in _MORE for subject in _SUBJECTS],
        materials.reading(),
        materials.records(),
        materials.editing(),
        materials.sums(),
        materials.advice(),
    ]
    mixed = []
    for kind in kinds:
        mixed += [(place / len(kind), prompt) for place, prompt in enumerate(kind)]
    return [prompt for _, prompt in sorted(mixed, key=lambda entry: entry[0])]
