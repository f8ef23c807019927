"""Tiny stories. Two questions go with each: what was found, and who helped."""

from .relation import Relation

TOPIC = "short_stories"
COLUMNS = ("hero", "place", "found", "helper", "story")

ENGLISH_STORIES = (
    (
        "fox",
        "well",
        "a golden bell",
        "a goat",
        (
            "A thirsty fox looked into an old well and found a golden bell. A goat helped the "
            "fox to pull it up. Then they rang the bell for the whole village."
        ),
    ),
    (
        "rabbit",
        "mill",
        "a tiny drum",
        "a mouse",
        (
            "A rabbit went to the mill for flour and found a tiny drum behind a sack. A mouse "
            "helped the rabbit to carry it home. They danced until the moon was high."
        ),
    ),
    (
        "bear",
        "bridge",
        "a red boat",
        "an otter",
        (
            "A bear came to a broken bridge and found a red boat under it. An otter helped the "
            "bear to row. So the bear crossed the river and did not get wet."
        ),
    ),
    (
        "hedgehog",
        "garden",
        "a silver spoon",
        "a snail",
        (
            "A hedgehog walked in the garden at night and found a silver spoon in the grass. A "
            "snail helped the hedgehog to clean it. In the morning they ate soup with it."
        ),
    ),
    (
        "crow",
        "tower",
        "a blue letter",
        "an owl",
        (
            "A crow flew up to the old tower and found a blue letter. An owl helped the crow to "
            "read it. It said that a birthday cake was waiting below."
        ),
    ),
    (
        "pony",
        "forest",
        "a lost hat",
        "a squirrel",
        (
            "A pony was alone in the forest and found a lost hat on a branch. A squirrel helped "
            "the pony to take it down. The farmer was glad to have his hat again."
        ),
    ),
    (
        "kitten",
        "cellar",
        "a warm blanket",
        "a cricket",
        (
            "A kitten fell into the dark cellar and found a warm blanket there. A cricket "
            "helped the kitten with a song until it slept. The next day somebody opened the "
            "door."
        ),
    ),
    (
        "turtle",
        "island",
        "a treasure map",
        "a crab",
        (
            "A turtle swam to a small island and found a treasure map in a bottle. A crab "
            "helped the turtle to dig in the sand. The treasure was a box full of sweet dates."
        ),
    ),
)

CHINESE_STORIES = (
    (
        "小猴子",
        "山洞",
        "一盏灯",
        "蝙蝠",
        "小猴子走进黑黑的山洞，找到了一盏灯。蝙蝠帮助小猴子把灯点亮。从此山洞里再也不黑了。",
    ),
    (
        "小鹿",
        "湖边",
        "一面镜子",
        "天鹅",
        "小鹿到湖边喝水，找到了一面镜子。天鹅帮助小鹿把镜子擦干净。小鹿看见了自己漂亮的角。",
    ),
    (
        "小松鼠",
        "雪地",
        "一只手套",
        "喜鹊",
        "小松鼠在雪地里迷了路，找到了一只手套。喜鹊帮助小松鼠认路回家。手套成了它温暖的小床。",
    ),
    (
        "小老虎",
        "竹林",
        "一支笛子",
        "刺猬",
        "小老虎在竹林里散步，找到了一支笛子。刺猬帮助小老虎学会了吹曲子。大家都来听它们演奏。",
    ),
    (
        "小绵羊",
        "草原",
        "一把雨伞",
        "黄鹂",
        "小绵羊在草原上遇到大雨，找到了一把雨伞。黄鹂帮助小绵羊把伞撑开。它们一起在伞下躲雨。",
    ),
    (
        "小青蛙",
        "荷塘",
        "一颗珍珠",
        "蜻蜓",
        "小青蛙跳进荷塘，找到了一颗珍珠。蜻蜓帮助小青蛙寻找失主。原来珍珠是河蚌姐姐丢的。",
    ),
    (
        "小黑猫",
        "阁楼",
        "一本旧书",
        "老鼠",
        "小黑猫爬上阁楼，找到了一本旧书。老鼠帮助小黑猫认识书里的字。它们后来成了好朋友。",
    ),
    (
        "小海龟",
        "沙滩",
        "一个瓶子",
        "海鸥",
        "小海龟爬到沙滩上，找到了一个瓶子。海鸥帮助小海龟打开瓶盖。瓶子里是一张写着祝福的纸。",
    ),
)

ENGLISH = (
    Relation(
        topic=TOPIC,
        language="en",
        columns=COLUMNS,
        facts=ENGLISH_STORIES,
        ask=(
            "In the story of the {hero} and the {place}, what did the {hero} find?",
            "What did the {hero} find in the story of the {hero} and the {place}?",
            "Tell me what the {hero} found in the story of the {hero} and the {place}.",
            "What was found in the story of the {hero} and the {place}?",
            "The story of the {hero} and the {place}: what did the {hero} find?",
            "What does the {hero} find in the story with the {place}?",
            "Could you tell me what the {hero} found in the story of the {place}?",
            "I read the story of the {hero} and the {place}. What did the {hero} find?",
            "I would like to know what the {hero} found in the {place} story.",
            "If I read the story of the {hero} and the {place}, what will the {hero} find?",
            "I forgot what the {hero} found in the {place} story. Can you remind me?",
        ),
        ask_test=(
            "Do you know what the {hero} found in the story with the {place}?",
            "Think of the story of the {hero} and the {place}. What did the {hero} find there?",
        ),
        answer="{found}.",
        statements=(
            "The story of the {hero} and the {place}. {story}",
            "In the story of the {hero} and the {place}, the {hero} found {found}.",
        ),
    ),
    Relation(
        topic=TOPIC,
        language="en",
        columns=COLUMNS,
        facts=ENGLISH_STORIES,
        ask=(
            "In the story of the {hero} and the {place}, who helped the {hero}?",
            "Who helped the {hero} in the story of the {hero} and the {place}?",
            "Tell me who helped the {hero} in the story of the {hero} and the {place}.",
            "Who was the helper in the story of the {hero} and the {place}?",
            "The story of the {hero} and the {place}: who helped the {hero}?",
            "Who helps the {hero} in the story with the {place}?",
            "Do you know who helped the {hero} in the story with the {place}?",
            "Think of the story of the {hero} and the {place}. Who helped the {hero} there?",
            "I would like to know who helped the {hero} in the {place} story.",
            "If I read the story of the {hero} and the {place}, who will help the {hero}?",
            "I forgot the helper of the {hero} in the {place} story. Can you remind me?",
        ),
        ask_test=(
            "Could you tell me who helped the {hero} in the story of the {place}?",
            "I read the story of the {hero} and the {place}. Who helped the {hero}?",
        ),
        answer="{helper}.",
        statements=(
            "Here is the story of the {hero} and the {place}. {story}",
            "In the story of the {hero} and the {place}, {helper} helped the {hero}.",
        ),
    ),
)

CHINESE = (
    Relation(
        topic=TOPIC,
        language="zh",
        columns=COLUMNS,
        facts=CHINESE_STORIES,
        ask=(
            "在{hero}和{place}的故事里，{hero}找到了什么？",
            "{hero}和{place}的故事里，找到的东西是什么？",
            "请问故事里的{hero}在{place}找到了什么？",
            "{hero}在{place}找到了什么？",
            "请告诉我，{hero}和{place}的故事里找到了什么。",
            "你知道{hero}和{place}的故事中找到了什么吗？",
            "我读了{hero}和{place}的故事，{hero}找到了什么？",
            "故事里，{hero}找到的东西是什么？",
            "能不能告诉我，{hero}在{place}找到的是什么？",
            "{hero}在{place}的故事，最后找到了哪样东西？",
            "如果我读{hero}和{place}的故事，会看到{hero}找到什么？",
        ),
        ask_test=(
            "我想知道{hero}在{place}的故事里找到了什么东西。",
            "讲{hero}和{place}的那个故事，找到了什么呢？",
        ),
        answer="{found}。",
        statements=(
            "{hero}和{place}的故事：{story}",
            "在{hero}和{place}的故事里，{hero}找到了{found}。",
        ),
    ),
    Relation(
        topic=TOPIC,
        language="zh",
        columns=COLUMNS,
        facts=CHINESE_STORIES,
        ask=(
            "在{hero}和{place}的故事里，谁帮助了{hero}？",
            "{hero}和{place}的故事里，帮忙的是谁？",
            "请问故事里谁在{place}帮助了{hero}？",
            "谁在{place}帮助了{hero}？",
            "请告诉我，{hero}和{place}的故事里谁来帮忙。",
            "我想知道{hero}在{place}的故事里是谁帮了忙。",
            "我读了{hero}和{place}的故事，谁帮助了{hero}？",
            "故事里，帮助{hero}的是谁？",
            "能不能告诉我，{hero}在{place}得到了谁的帮助？",
            "{hero}在{place}遇到的帮手是谁？",
            "如果我读{hero}和{place}的故事，会看到谁帮助{hero}？",
        ),
        ask_test=(
            "你知道{hero}和{place}的故事中谁帮了忙吗？",
            "讲{hero}和{place}的那个故事，谁帮助了{hero}呢？",
        ),
        answer="{helper}。",
        statements=(
            "讲一讲{hero}和{place}的故事。{story}",
            "在{hero}和{place}的故事里，{helper}帮助了{hero}。",
        ),
    ),
)

RELATIONS = ENGLISH + CHINESE
