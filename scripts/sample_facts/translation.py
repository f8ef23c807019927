"""Words translated both ways; every pair is one to one."""

from .relation import Relation

WORDS = (
    ("water", "水"),
    ("fire", "火"),
    ("book", "书"),
    ("apple", "苹果"),
    ("friend", "朋友"),
    ("school", "学校"),
    ("milk", "牛奶"),
    ("bread", "面包"),
    ("mountain", "山"),
    ("moon", "月亮"),
    ("sun", "太阳"),
    ("flower", "花"),
    ("tea", "茶"),
)

RELATIONS = (
    Relation(
        topic="translation",
        language="en",
        columns=("english", "chinese"),
        facts=WORDS,
        ask=(
            'How do you say "{english}" in Chinese?',
            'What is "{english}" in Chinese?',
            'Translate "{english}" into Chinese.',
            'What is the Chinese word for "{english}"?',
            'Please give me the Chinese for "{english}".',
            'Which Chinese word means "{english}"?',
            'I want to say "{english}" in Chinese.',
            'Do you know how to write "{english}" in Chinese?',
        ),
        ask_test=(
            'Could you translate the word "{english}" into Chinese for me?',
            'Tell me the Chinese word that means "{english}".',
            'If I speak Chinese, how do I say "{english}"?',
        ),
        answer="{chinese}",
        statements=(
            'The Chinese word for "{english}" is {chinese}.',
            'In Chinese, "{english}" is {chinese}.',
            '{chinese} means "{english}".',
        ),
        phrasings=8,
    ),
    Relation(
        topic="translation",
        language="zh",
        columns=("english", "chinese"),
        facts=WORDS,
        ask=(
            "“{chinese}”用英语怎么说？",
            "“{chinese}”的英文是什么？",
            "把“{chinese}”翻译成英语。",
            "我想用英语说“{chinese}”，应该怎么说？",
            "请告诉我“{chinese}”的英语单词。",
            "“{chinese}”的英语怎么写？",
            "你知道“{chinese}”用英文怎么讲吗？",
            "“{chinese}”翻译成英文是什么？",
        ),
        ask_test=(
            "请帮我把“{chinese}”这个词译成英语。",
            "英语里“{chinese}”是哪个单词？",
            "请问“{chinese}”在英语里叫什么？",
        ),
        answer="{english}",
        statements=(
            "“{chinese}”的英语是 {english}。",
            "英语单词 {english} 的意思是“{chinese}”。",
            "“{chinese}”翻译成英语是 {english}。",
        ),
        phrasings=8,
    ),
)
