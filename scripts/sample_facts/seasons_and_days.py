"""Days of the week, seasons and festivals."""

from .relation import Relation

TOPIC = "seasons_and_days"

ENGLISH = (
    Relation(
        topic=TOPIC,
        language="en",
        columns=("day", "next_day"),
        facts=(
            ("Monday", "Tuesday"),
            ("Tuesday", "Wednesday"),
            ("Wednesday", "Thursday"),
            ("Thursday", "Friday"),
            ("Friday", "Saturday"),
            ("Saturday", "Sunday"),
            ("Sunday", "Monday"),
        ),
        ask=(
            "What day comes after {day}?",
            "Which day comes after {day}?",
            "Which day follows {day}?",
            "What is the day after {day}?",
            "Tell me the day after {day}.",
            "Do you know which day follows {day}?",
            "Today is {day}. What day is tomorrow?",
            "What day is it after {day}?",
        ),
        ask_test=(
            "Could you tell me the day that comes after {day}?",
            "If today is {day}, what day is tomorrow?",
        ),
        answer="{next_day}.",
        statements=(
            "{next_day} is the day after {day}.",
            "After {day} comes {next_day}.",
            "If today is {day}, tomorrow is {next_day}.",
        ),
    ),
    Relation(
        topic=TOPIC,
        language="en",
        columns=("season", "next_season"),
        facts=(
            ("spring", "summer"),
            ("summer", "autumn"),
            ("autumn", "winter"),
            ("winter", "spring"),
        ),
        ask=(
            "Which season comes after {season}?",
            "What season comes after {season}?",
            "Which season follows {season}?",
            "What is the season after {season}?",
            "Tell me the season after {season}.",
            "Could you tell me the season that follows {season}?",
            "Now it is {season}. What is the next season?",
            "When {season} is over, which season begins?",
        ),
        ask_test=(
            "Do you know the next season after {season}?",
            "After {season}, which season comes?",
        ),
        answer="{next_season}.",
        statements=(
            "{next_season} is the season after {season}.",
            "After {season} comes {next_season}.",
            "When {season} is over, {next_season} begins.",
        ),
    ),
    Relation(
        topic=TOPIC,
        language="en",
        columns=("festival", "month"),
        facts=(
            ("Christmas", "December"),
            ("New Year's Day", "January"),
            ("Valentine's Day", "February"),
            ("Halloween", "October"),
            ("Earth Day", "April"),
        ),
        ask=(
            "In which month is {festival}?",
            "Which month is {festival} in?",
            "What month does {festival} fall in?",
            "Tell me the month of {festival}.",
            "Do you know the month of {festival}?",
            "In what month do people have {festival}?",
            "{festival} is in one month of the year. Which month is it?",
            "I want to know the month of {festival}.",
        ),
        ask_test=(
            "Could you tell me which month {festival} is in?",
            "{festival}: in which month does it come?",
        ),
        answer="{month}.",
        statements=(
            "{festival} is in {month}.",
            "In the month of {month} people have {festival}.",
            "The month of {festival} is {month}.",
        ),
    ),
)

CHINESE = (
    Relation(
        topic=TOPIC,
        language="zh",
        columns=("day", "next_day"),
        facts=(
            ("星期一", "星期二"),
            ("星期二", "星期三"),
            ("星期三", "星期四"),
            ("星期四", "星期五"),
            ("星期五", "星期六"),
            ("星期六", "星期日"),
            ("星期日", "星期一"),
        ),
        ask=(
            "{day}的后一天是星期几？",
            "{day}后面一天是星期几？",
            "今天是{day}，明天是星期几？",
            "请问{day}的第二天是星期几？",
            "过了{day}是星期几？",
            "我想知道{day}的后面是星期几。",
            "请告诉我{day}的后一天是哪一天。",
            "{day}之后是哪一天？",
            "{day}的下一天是星期几？",
            "昨天是{day}，今天是星期几？",
        ),
        ask_test=(
            "如果今天是{day}，那么明天是星期几？",
            "你知道{day}之后是星期几吗？",
        ),
        answer="{next_day}。",
        statements=(
            "{day}的后一天是{next_day}。",
            "今天是{day}，明天就是{next_day}。",
            "过了{day}就是{next_day}。",
        ),
        phrasings=10,
    ),
    Relation(
        topic=TOPIC,
        language="zh",
        columns=("season", "next_season"),
        facts=(
            ("春天", "夏天"),
            ("夏天", "秋天"),
            ("秋天", "冬天"),
            ("冬天", "春天"),
        ),
        ask=(
            "{season}之后是什么季节？",
            "{season}过去了是哪个季节？",
            "请问{season}的下一个季节是什么？",
            "我想知道{season}的下一个季节是哪个。",
            "{season}的后面是哪个季节？",
            "请告诉我{season}之后的季节。",
            "现在是{season}，下一个季节是什么？",
            "过了{season}是什么季节？",
        ),
        ask_test=(
            "你知道{season}后面是什么季节吗？",
            "{season}结束以后是什么季节？",
        ),
        answer="{next_season}。",
        statements=(
            "{season}之后是{next_season}。",
            "过了{season}就是{next_season}。",
            "{season}的下一个季节是{next_season}。",
        ),
    ),
    Relation(
        topic=TOPIC,
        language="zh",
        columns=("festival", "date"),
        facts=(
            ("春节", "正月初一"),
            ("元宵节", "正月十五"),
            ("端午节", "五月初五"),
            ("七夕节", "七月初七"),
            ("中秋节", "八月十五"),
            ("重阳节", "九月初九"),
        ),
        ask=(
            "{festival}是农历哪一天？",
            "{festival}在农历几月几日？",
            "请问{festival}是农历的什么日子？",
            "你知道{festival}是农历哪一天吗？",
            "请告诉我{festival}的农历日期。",
            "农历的哪一天是{festival}？",
            "{festival}的农历日期是什么？",
            "人们在农历哪一天过{festival}？",
        ),
        ask_test=(
            "我想知道{festival}是农历几月几日。",
            "{festival}在农历的哪一天呢？",
        ),
        answer="农历{date}。",
        statements=(
            "{festival}是农历{date}。",
            "农历{date}是{festival}。",
            "人们在农历{date}过{festival}。",
        ),
    ),
)

RELATIONS = ENGLISH + CHINESE
