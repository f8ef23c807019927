"""Counting letters, characters, legs and wheels."""

from .relation import Relation

ENGLISH = (
    Relation(
        topic="counting",
        language="en",
        columns=("word", "number"),
        facts=(
            ("cat", "3"),
            ("lion", "4"),
            ("zebra", "5"),
            ("banana", "6"),
            ("chicken", "7"),
            ("elephant", "8"),
        ),
        ask=(
            'How many letters are in the word "{word}"?',
            'How many letters does "{word}" have?',
            'Count the letters in "{word}".',
            'Tell me how many letters "{word}" has.',
            'What is the number of letters in "{word}"?',
            'Do you know how many letters there are in "{word}"?',
            'I write the word "{word}". How many letters do I write?',
            'Please count the letters of the word "{word}".',
        ),
        ask_test=(
            'Could you count the letters in the word "{word}" for me?',
            'Take the word "{word}". How many letters has it got?',
        ),
        answer="{number} letters.",
        statements=(
            'The word "{word}" has {number} letters.',
            'There are {number} letters in "{word}".',
        ),
    ),
    Relation(
        topic="counting",
        language="en",
        columns=("animal", "number"),
        facts=(
            ("a spider", "8"),
            ("a bee", "6"),
            ("a horse", "4"),
            ("a parrot", "2"),
        ),
        ask=(
            "How many legs does {animal} have?",
            "How many legs are there on {animal}?",
            "Count the legs of {animal}.",
            "Tell me how many legs {animal} has.",
            "What is the number of legs of {animal}?",
            "Do you know how many legs {animal} has?",
            "I draw {animal}. How many legs do I draw?",
            "{animal} walks on how many legs?",
        ),
        ask_test=(
            "Could you count the legs of {animal} for me?",
            "Look at {animal}. How many legs has it got?",
        ),
        answer="{number} legs.",
        statements=(
            "{animal} has {number} legs.",
            "{animal} walks on {number} legs.",
        ),
    ),
    Relation(
        topic="counting",
        language="en",
        columns=("vehicle", "number"),
        facts=(
            ("a bicycle", "2 wheels"),
            ("a tricycle", "3 wheels"),
            ("a family car", "4 wheels"),
            ("a unicycle", "1 wheel"),
        ),
        ask=(
            "How many wheels does {vehicle} have?",
            "How many wheels are there on {vehicle}?",
            "Count the wheels of {vehicle}.",
            "Tell me how many wheels {vehicle} has.",
            "What is the number of wheels of {vehicle}?",
            "Look at {vehicle}. How many wheels has it got?",
            "I draw {vehicle}. How many wheels do I draw?",
            "{vehicle} rolls on how many wheels?",
        ),
        ask_test=(
            "Could you count the wheels of {vehicle} for me?",
            "Do you know how many wheels {vehicle} has?",
        ),
        answer="{number}.",
        statements=(
            "{vehicle} has {number}.",
            "{vehicle} rolls on {number}.",
        ),
    ),
)

CHINESE = (
    Relation(
        topic="counting",
        language="zh",
        columns=("word", "number"),
        facts=(
            ("海", "一"),
            ("公园", "两"),
            ("图书馆", "三"),
            ("一心一意", "四"),
            ("美丽的花园", "五"),
            ("我爱我的妈妈", "六"),
        ),
        ask=(
            "“{word}”有几个字？",
            "“{word}”一共有几个字？",
            "请问“{word}”是几个字？",
            "能帮我数数“{word}”是几个字吗？",
            "你知道“{word}”有几个字吗？",
            "请告诉我“{word}”的字数。",
            "写“{word}”要写几个字？",
            "“{word}”的字数是多少？",
        ),
        ask_test=(
            "我想知道“{word}”里有几个字。",
            "数一数“{word}”有几个字。",
        ),
        answer="{number}个字。",
        statements=(
            "“{word}”有{number}个字。",
            "写“{word}”要写{number}个字。",
        ),
    ),
    Relation(
        topic="counting",
        language="zh",
        columns=("animal", "number"),
        facts=(
            ("蜘蛛", "八"),
            ("蝴蝶", "六"),
            ("老虎", "四"),
            ("公鸡", "两"),
        ),
        ask=(
            "{animal}有几条腿？",
            "{animal}一共有几条腿？",
            "请问{animal}长着几条腿？",
            "数一数{animal}有几条腿。",
            "我想知道一只{animal}有几条腿。",
            "请告诉我{animal}有多少条腿。",
            "画{animal}要画几条腿？",
            "一只{animal}有多少条腿？",
        ),
        ask_test=(
            "你知道{animal}有几条腿吗？",
            "能帮我数数{animal}有几条腿吗？",
        ),
        answer="{number}条腿。",
        statements=(
            "{animal}有{number}条腿。",
            "一只{animal}长着{number}条腿。",
        ),
    ),
    Relation(
        topic="counting",
        language="zh",
        columns=("vehicle", "number"),
        facts=(
            ("自行车", "两"),
            ("三轮车", "三"),
            ("小轿车", "四"),
            ("独轮车", "一"),
        ),
        ask=(
            "{vehicle}有几个轮子？",
            "{vehicle}一共有几个轮子？",
            "请问{vehicle}装着几个轮子？",
            "数一数{vehicle}有几个轮子。",
            "你知道{vehicle}有几个轮子吗？",
            "请告诉我{vehicle}有多少个轮子。",
            "画{vehicle}要画几个轮子？",
            "一辆{vehicle}有多少个轮子？",
        ),
        ask_test=(
            "我想知道一辆{vehicle}有几个轮子。",
            "能帮我数数{vehicle}有几个轮子吗？",
        ),
        answer="{number}个轮子。",
        statements=(
            "{vehicle}有{number}个轮子。",
            "一辆{vehicle}装着{number}个轮子。",
        ),
    ),
)

RELATIONS = ENGLISH + CHINESE
