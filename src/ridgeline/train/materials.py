"""What the prompts that ship ask about: programs, letters, orders, sums, everyday trouble.

A head that has only seen answers to short questions drafts badly where an answer repeats, edits or
converts what the prompt holds.
"""

from __future__ import annotations

_NAMES = (
    "Amara Osei",
    "Jonas Weber",
    "Li Na",
    "Priya Nair",
    "Tom Hughes",
    "Elif Demir",
    "Ana Sousa",
)
_PLACES = ("Leeds", "Porto", "Graz", "Galway", "Bergen", "Ghent", "Turku", "Lyon")
_DAYS = ("Monday 4 March", "Friday 12 July", "Tuesday 9 April", "Sunday 22 September", "3 November")
_THINGS = (
    "desk lamp",
    "rain jacket",
    "coffee grinder",
    "tent",
    "keyboard",
    "garden hose",
    "kettle",
)
_GROUPS = (
    "the rowing club",
    "the school board",
    "the choir",
    "the tenants' meeting",
    "the film club",
)
_PLANS = (
    "a new boiler",
    "a summer fair",
    "cheaper tickets",
    "a second rehearsal",
    "new bike stands",
)

_PASSAGES = (
    "Dear Sir or Madam, on {day} I ordered a {thing} from your shop in {place}. It arrived two "
    "weeks late and the box was open. I have tried to reach you by telephone several times. "
    "Please send me another one or return the money. Yours faithfully, {name}",
    "{group} met on {day} in {place}. {name} reported that {plan} would cost about {number} "
    "pounds. Half of those present were in favour, the others wanted to wait until the accounts "
    "are closed. It was agreed that {other} will ask for two more offers and report at the next "
    "meeting.",
    "The museum in {place} will be closed from {day} for {number} days. Visitors who have already "
    "bought tickets may use them later in the year. The café and the garden stay open. Questions "
    "are answered by {name} at the information desk between nine and five.",
    "{name} grew up in {place}, where her parents kept a small shop. At sixteen she began to "
    "repair radios, and by thirty she led a workshop of {number} people. She is remembered for a "
    "simple {thing} that lasted longer than any other, and for the evening classes that she gave "
    "for free.",
    "Hi {name}, thanks for your message. The train to {place} leaves at half past seven on {day}, "
    "so let us meet at seven by the ticket office. Please bring the {thing} and the list that "
    "{other} sent round. If you are late, call me and I will wait for the next one.",
    "Heavy rain fell over {place} on {day}. Within {number} minutes several streets were under "
    "water, and the fire brigade was called out to pump out cellars. Nobody was hurt. {name} of "
    "the town council said that larger drains had been planned for years but never paid for.",
)
_READING = (
    "Summarise the following text in two sentences.\n\n{}",
    "Translate into German:\n\n{}",
    "Translate the following text into French.\n\n{}",
    "Extract the people, places, dates and numbers of this text as JSON.\n\n{}",
    "Turn this into bullet points:\n\n{}",
    "Rewrite this text so that it is shorter and friendlier:\n\n{}",
    "Correct and improve the style of this text, and keep its meaning:\n\n{}",
    "{}\n\nWrite a reply.",
    "{}\n\nWho is named here, and what is each of them to do or said to have done?",
    "Übersetze ins Spanische:\n\n{}",
)

_ORDERS = (
    "Order no. {number} by {name}, {place}, {mail}: {count} x {thing} at {price} EUR, 1 x "
    "{second} at {price2} EUR. Delivery on {day}.",
    "{name} ({mail}) books {count} seats on {day} from {place} to {place2}, one {thing} as "
    "luggage.",
    "Name: {name}; town: {place}; member since {year}; owes {price} EUR; borrowed: {thing}, "
    "{second}.",
)
_RECORDS = (
    "Convert this into JSON with sensible keys. Answer with the JSON alone.\n\n{}",
    "Write the following as a YAML document.\n\n{}",
    "Make a Markdown table with one row for each item of this text.\n\n{}",
    "Turn this into an SQL INSERT statement for a suitable table.\n\n{}",
)

_PROGRAMS = (
    "def mean(v):\n    t = 0\n    for x in v:\n        t = t + x\n    return t / len(v)",
    "def find(a, x):\n    for i in range(len(a)):\n        if a[i] == x:\n            return i\n"
    "    return None",
    "def load(path):\n    f = open(path)\n    rows = []\n    for line in f:\n"
    "        rows.append(line.strip().split(','))\n    return rows",
    "class Account:\n    def __init__(self, owner):\n        self.owner = owner\n"
    "        self.balance = 0\n\n    def pay_in(self, amount):\n        self.balance += amount\n\n"
    "    def pay_out(self, amount):\n        self.balance -= amount",
    "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)",
    "def count(words):\n    d = {}\n    for w in words:\n        if w in d:\n            d[w] += "
    "1\n"
    "        else:\n            d[w] = 1\n    return d",
    "def overlap(a, b):\n    result = []\n    for x in a:\n        for y in b:\n"
    "            if x == y and x not in result:\n                result.append(x)\n    return "
    "result",
    "function total(items) {\n  var sum = 0;\n  for (var i = 0; i <= items.length; i++) {\n"
    "    sum += items[i].price * items[i].quantity;\n  }\n  return sum;\n}",
    "async function getUser(id) {\n  const response = await fetch('/users/' + id);\n"
    "  const user = response.json();\n  return user.name;\n}",
    "SELECT name, COUNT(*) FROM visits\nWHERE year = 2024\nORDER BY name;",
    "SELECT b.title, a.name FROM books b, authors a\nWHERE b.price > 20;",
    "public static boolean isPalindrome(String s) {\n    int i = 0, j = s.length();\n"
    "    while (i < j) {\n        if (s.charAt(i) != s.charAt(j)) return false;\n"
    "        i++; j--;\n    }\n    return true;\n}",
    "#!/bin/bash\nfor f in $(ls *.txt); do\n  cp $f backup/$f\n  echo copied $f\ndone",
    "def grade(score):\n    if score > 90:\n        return 'A'\n    if score > 80:\n"
    "        return 'B'\n    if score > 70:\n        return 'C'\n    return 'D'",
)
_EDITING = (
    "Explain step by step what this code does.\n\n```\n{}\n```",
    "Is there a mistake in this code? If so, explain it and give the corrected "
    "code.\n\n```\n{}\n```",
    "Give the names in this code more telling ones and change nothing else. Answer with the code "
    "alone.\n\n```\n{}\n```",
    "Add comments and documentation to this code:\n\n```\n{}\n```",
    "Rewrite the code below so that wrong input is reported by an error.\n\n```\n{}\n```",
    "Rewrite this in TypeScript.\n\n```\n{}\n```",
    "Write unit tests for the following code.\n\n```\n{}\n```",
    "How could this be made faster or shorter? Show the new code.\n\n```\n{}\n```",
    "Add type hints or declarations where they are missing; answer with the whole "
    "code:\n\n```\n{}\n```",
)

_SUMS = (
    "A bag holds {a} blue and {b} yellow marbles. Two are drawn without looking. What is the "
    "probability that both are blue?",
    "A coat costs {c} euros. Its price rises by {a} percent and then falls by {b} percent. What "
    "does it cost now? Show your working.",
    "A tank of {c} litres is filled by a pipe that gives {a} litres a minute while {b} litres a "
    "minute leak out. Does it ever fill, and if so when?",
    "{name} walks {a} km north and then {b} km east. How far from the start is that in a straight "
    "line?",
    "In how many ways can {a} books be put on a shelf if {b} of them must stand together? Explain.",
    "The sum of two numbers is {c} and their difference is {a}. Find both numbers step by step.",
    "{c} euros are saved at {a} percent interest a year. How much is it after three years?",
    "What is the derivative of {a}x^3 - {b}x + {c}? Explain each step.",
)

_TROUBLE = (
    "my laptop gets very hot and loud when I watch films",
    "my bread comes out dense although I let it rise for hours",
    "my neighbour practises the drums late every evening",
    "I keep forgetting the names of people whom I have just met",
    "my cat wakes me at four every morning",
    "I have been offered a job in another town and cannot decide",
    "my house plants get yellow leaves in winter",
    "my knees hurt after running more than five kilometres",
    "I have to learn two hundred words of Italian in three weeks",
    "our team's meetings take twice as long as planned",
    "my bicycle's brakes squeal when it rains",
    "I am nervous before every job interview",
    "my savings are spread over four accounts and I lose track",
    "my son does not want to do his homework",
    "the wireless network does not reach my bedroom",
    "I would like to read more but always end up on my phone",
)
_ASKING = (
    "Hello! I have a problem: {}. What could be the reason, and what should I try first?",
    "{}. Please give me a plan in five steps.",
    "A friend wrote to me: '{}.' Help me to write a kind and useful answer.",
    "What questions would an expert ask somebody who says: {}?",
)


def reading() -> list[str]:
    """Letters, reports and notices, to summarise, translate, convert and answer."""
    texts = [passage.format(**_slots(k)) for k in range(12) for passage in _PASSAGES]
    return [
        _READING[(5 * i + j) % len(_READING)].format(text)
        for i, text in enumerate(texts)
        for j in range(5)
    ]


def records() -> list[str]:
    """Orders and bookings, to put into JSON, YAML, tables and SQL."""
    texts = [order.format(**_slots(k)) for k in range(18) for order in _ORDERS]
    return [
        _RECORDS[(i + j) % len(_RECORDS)].format(text)
        for i, text in enumerate(texts)
        for j in range(3)
    ]


def editing() -> list[str]:
    """Programs, to explain, mend, change and test."""
    return [task.format(program) for program in _PROGRAMS for task in _EDITING]


def sums() -> list[str]:
    """Word problems."""
    return [task.format(**_slots(k)) for k in range(16) for task in _SUMS]


def advice() -> list[str]:
    """Everyday trouble."""
    return [form.format(trouble) for trouble in _TROUBLE for form in _ASKING]


def _slots(k: int) -> dict[str, object]:
    """The k-th filling of all templates."""
    name = _NAMES[k % len(_NAMES)]
    return {
        "name": name,
        "mail": f"{name.split()[-1].lower()}{k}@example.org",
        "place": _PLACES[(3 * k) % len(_PLACES)],
        "place2": _PLACES[(3 * k + 1) % len(_PLACES)],
        "day": _DAYS[k % len(_DAYS)],
        "thing": _THINGS[(2 * k) % len(_THINGS)],
        "second": _THINGS[(2 * k + 3) % len(_THINGS)],
        "other": _NAMES[(k + 3) % len(_NAMES)],
        "group": _GROUPS[k % len(_GROUPS)],
        "plan": _PLANS[(2 * k + 1) % len(_PLANS)],
        "number": 20 + 17 * k,
        "count": 2 + k % 5,
        "price": f"{12 + 3 * k}.50",
        "price2": f"{5 + 2 * k}.99",
        "year": 1998 + k,
        "a": 3 + k % 9,
        "b": 2 + k % 7,
        "c": 40 + 12 * k,
    }
