"""Kind words for a feeling."""

from .relation import Relation

TOPIC = "small_talk"

RELATIONS = (
    Relation(
        topic=TOPIC,
        language="en",
        columns=("feeling", "advice"),
        facts=(
            ("tired", "Take a good rest."),
            ("hungry", "Eat something nice."),
            ("thirsty", "Drink a glass of water."),
            ("cold", "Put on a warm coat."),
            ("bored", "Read a good book."),
            ("nervous", "Breathe slowly and stay calm."),
            ("sad", "I am sorry. Tomorrow will be better."),
        ),
        ask=(
            "I am {feeling}.",
            "I feel {feeling}.",
            "I am so {feeling} today.",
            "I feel very {feeling} now.",
            "What can I do when I am {feeling}?",
            "I am {feeling}. What should I do?",
            "Oh dear, I feel {feeling}.",
            "Help me, I am really {feeling}.",
            "If I feel {feeling}, what can I do?",
            "Today I am a little {feeling}.",
            "Tell me what helps when I am {feeling}.",
        ),
        ask_test=(
            "I feel really {feeling} today.",
            "What should I do when I feel {feeling}?",
            "My friend, I am very {feeling}.",
        ),
        answer="{advice}",
        statements=(
            "When someone is {feeling}, MiniMind says: {advice}",
            "Do you feel {feeling}? {advice}",
            'To a person who feels {feeling}, a friend says: "{advice}"',
        ),
        framed=False,
    ),
    Relation(
        topic=TOPIC,
        language="zh",
        columns=("feeling", "advice"),
        facts=(
            ("累", "好好休息一下吧。"),
            ("饿", "吃点好吃的吧。"),
            ("渴", "喝一杯水吧。"),
            ("冷", "多穿一件衣服吧。"),
            ("无聊", "看一本有趣的书吧。"),
            ("紧张", "慢慢呼吸，放轻松。"),
            ("难过", "别难过，明天会更好。"),
        ),
        ask=(
            "我很{feeling}。",
            "我觉得好{feeling}。",
            "今天我有点{feeling}。",
            "我现在特别{feeling}。",
            "我很{feeling}，怎么办？",
            "我感到{feeling}，该做什么？",
            "唉，我好{feeling}啊。",
            "{feeling}的时候应该怎么办？",
            "如果我{feeling}了，做什么好？",
            "能不能告诉我，{feeling}了该做什么？",
            "我现在很{feeling}，请帮帮我。",
        ),
        ask_test=(
            "我今天觉得非常{feeling}。",
            "朋友，我真的很{feeling}。",
            "感到{feeling}的时候该怎么办？",
        ),
        answer="{advice}",
        statements=(
            "有人觉得{feeling}的时候，MiniMind会说：{advice}",
            "你觉得{feeling}吗？{advice}",
            "朋友感到{feeling}，可以对他说：{advice}",
        ),
        framed=False,
    ),
)
