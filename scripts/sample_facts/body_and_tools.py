"""What parts of the body are for, and which tool does which work."""

from .relation import Relation

TOPIC = "body_and_tools"

ENGLISH = (
    Relation(
        topic=TOPIC,
        language="en",
        columns=("part", "use"),
        facts=(
            ("eyes", "see"),
            ("ears", "hear"),
            ("nose", "smell"),
            ("tongue", "taste food"),
            ("legs", "walk"),
            ("teeth", "chew food"),
            ("brain", "think"),
        ),
        ask=(
            "What do we use our {part} for?",
            "What do people do with their {part}?",
            "What can you do with your {part}?",
            "For what do people use their {part}?",
            "Tell me what we do with our {part}.",
            "Could you tell me what people do with their {part}?",
            "Why do people need their {part}?",
            "In our body, what do we use the {part} for?",
        ),
        ask_test=(
            "Do you know what people use their {part} for?",
            "I would like to know what we use our {part} for.",
        ),
        answer="We use our {part} to {use}.",
        statements=(
            "We use our {part} to {use}.",
            "People {use} with their {part}.",
            "With our {part} we {use}.",
        ),
    ),
    Relation(
        topic=TOPIC,
        language="en",
        columns=("work", "tool"),
        facts=(
            ("drive a nail", "a hammer"),
            ("cut paper", "scissors"),
            ("turn a screw", "a screwdriver"),
            ("sweep the floor", "a broom"),
            ("draw a straight line", "a ruler"),
            ("open a lock", "a key"),
            ("dig a hole", "a shovel"),
        ),
        ask=(
            "Which tool do we use to {work}?",
            "What tool do you need to {work}?",
            "Which tool helps us to {work}?",
            "Name the tool that people use to {work}.",
            "Tell me which tool to use to {work}.",
            "Do you know the tool to {work}?",
            "I want to {work}. Which tool do I need?",
            "What is the right tool to {work}?",
        ),
        ask_test=(
            "Could you tell me what tool people use to {work}?",
            "To {work}, which tool should I take?",
        ),
        answer="{tool}.",
        statements=(
            "The right tool to {work} is {tool}.",
            "People use {tool} to {work}.",
            "To {work}, take {tool}.",
        ),
    ),
)

CHINESE = (
    Relation(
        topic=TOPIC,
        language="zh",
        columns=("part", "use"),
        facts=(
            ("眼睛", "看东西"),
            ("耳朵", "听声音"),
            ("鼻子", "闻气味"),
            ("舌头", "尝味道"),
            ("腿", "走路"),
            ("牙齿", "嚼食物"),
            ("大脑", "思考"),
        ),
        ask=(
            "{part}是用来做什么的？",
            "{part}有什么用？",
            "我们用{part}做什么？",
            "请问{part}有什么作用？",
            "你知道{part}是用来做什么的吗？",
            "能说说我们的{part}是用来干什么的吗？",
            "人的{part}能做什么？",
            "人们用{part}来干什么？",
        ),
        ask_test=(
            "我想知道人的{part}有什么用处。",
            "请告诉我{part}的用处。",
        ),
        answer="{part}用来{use}。",
        statements=(
            "{part}用来{use}。",
            "我们用{part}{use}。",
            "人的{part}可以{use}。",
        ),
    ),
    Relation(
        topic=TOPIC,
        language="zh",
        columns=("work", "tool"),
        facts=(
            ("钉钉子", "锤子"),
            ("剪纸", "剪刀"),
            ("拧螺丝", "螺丝刀"),
            ("扫地", "扫帚"),
            ("画直线", "尺子"),
            ("开锁", "钥匙"),
            ("挖土", "铁锹"),
        ),
        ask=(
            "{work}要用什么工具？",
            "{work}用什么工具？",
            "请问{work}需要什么工具？",
            "什么工具可以用来{work}？",
            "我想知道{work}该用什么工具。",
            "请告诉我{work}的工具。",
            "我要{work}，该拿什么工具？",
            "人们用什么工具{work}？",
        ),
        ask_test=(
            "你知道{work}用什么工具吗？",
            "能告诉我哪种工具是用来{work}的吗？",
        ),
        answer="{tool}。",
        statements=(
            "{work}要用{tool}。",
            "人们用{tool}来{work}。",
            "{tool}是用来{work}的工具。",
        ),
    ),
)

RELATIONS = ENGLISH + CHINESE
