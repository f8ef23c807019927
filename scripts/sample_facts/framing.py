"""Words that may stand around any question, so that a model learns to look past them.

The test uses combinations that training does not, made of the same words.
"""

FRAMES = {
    "en": (
        "Hello! {question}",
        "Hi MiniMind! {question}",
        "Excuse me. {question}",
        "One more question. {question}",
        "Please help me. {question}",
        "Let me ask you. {question}",
        "{question} Thank you!",
        "{question} Please be brief.",
        "{question} I am curious.",
        "Hello! {question} Thank you!",
        "Good evening. {question} Thanks!",
    ),
    "zh": (
        "你好！{question}",
        "你好，MiniMind。{question}",
        "打扰一下，{question}",
        "小助手，{question}",
        "再问一个问题。{question}",
        "我有个问题：{question}",
        "{question}谢谢！",
        "{question}请简短回答。",
        "{question}我很好奇。",
        "你好！{question}谢谢你。",
        "下午好，{question}多谢！",
    ),
}

TEST_FRAMES = {
    "en": ("Excuse me. {question} Thank you!", "Hello! {question} I am curious."),
    "zh": ("打扰一下，{question}谢谢！", "你好！{question}我很好奇。"),
}
