"""One step of reasoning: comparisons, if-then, and the kind that a thing belongs to."""

from .relation import Relation

ENGLISH = (
    Relation(
        topic="reasoning",
        language="en",
        columns=("one", "more", "other", "less"),
        facts=(
            ("Tom", "taller", "Ann", "shorter"),
            ("Ben", "older", "Lucy", "younger"),
            ("Sam", "faster", "Kate", "slower"),
            ("Jack", "stronger", "Emma", "weaker"),
            ("Leo", "heavier", "Nina", "lighter"),
            ("Max", "louder", "Rosa", "quieter"),
        ),
        ask=(
            "{one} is {more} than {other}. Who is {less}?",
            "{one} is {more} than {other}. Which of them is {less}?",
            "{one} is {more} than {other}. Tell me who is {less}.",
            "Who is {less} if {one} is {more} than {other}?",
            "Suppose that {one} is {more} than {other}. Could you tell me who is {less}?",
            "Of {one} and {other}, {one} is {more}. Who is {less}?",
            "I see that {one} is {more} than {other}. So who is {less}?",
            "Do you know who is {less} when {one} is {more} than {other}?",
        ),
        ask_test=(
            "If {one} is {more} than {other}, which one of the two is {less}?",
            "We know that {one} is {more} than {other}. Who is the {less} one?",
        ),
        answer="{other} is {less}.",
        statements=(
            "{one} is {more} than {other}, so {other} is {less}.",
            "If {one} is {more} than {other}, then {other} is {less} than {one}.",
        ),
    ),
    Relation(
        topic="reasoning",
        language="en",
        columns=("cause", "effect"),
        facts=(
            ("it rains", "the street gets wet"),
            ("ice gets warm", "the ice melts"),
            ("a glass falls down", "the glass breaks"),
            ("you press the switch", "the lamp lights up"),
            ("the wind blows", "the kite flies"),
        ),
        ask=(
            "If {cause}, {effect}. Now {cause}. What happens?",
            "When {cause}, {effect}. Today {cause}. What happens?",
            "The rule: if {cause}, {effect}. Now {cause}. What happens then?",
            "We know that if {cause}, {effect}. Now {cause}. What follows?",
            "What happens when {cause}?",
            "Tell me what happens if {cause}.",
            "Could you tell me what happens when {cause}?",
            "I see that {cause}. What happens next?",
        ),
        ask_test=(
            "Suppose that {cause}. What will happen?",
            "Do you know what happens when {cause}?",
        ),
        answer="{effect}.",
        statements=(
            "If {cause}, {effect}.",
            "When {cause}, then {effect}.",
            "We see that {cause}, so {effect}.",
        ),
    ),
    Relation(
        topic="reasoning",
        language="en",
        columns=("thing", "kind"),
        facts=(
            ("a rose", "a flower"),
            ("a potato", "a vegetable"),
            ("an eagle", "a bird"),
            ("an oak", "a tree"),
            ("gold", "a metal"),
        ),
        ask=(
            "What kind of thing is {thing}?",
            "Which kind of thing is {thing}?",
            "What kind does {thing} belong to?",
            "Tell me what kind of thing {thing} is.",
            "Do you know what kind of thing {thing} is?",
            "{thing} belongs to which kind of things?",
            "I want to know which kind {thing} belongs to.",
            "Name the kind that {thing} belongs to.",
        ),
        ask_test=(
            "Could you tell me which kind of thing {thing} is?",
            "To which kind of things does {thing} belong?",
        ),
        answer="{kind}.",
        statements=(
            "{thing} is {kind}.",
            "What kind of thing is {thing}? It is {kind}.",
            "{thing} is one kind of thing: {kind}.",
        ),
    ),
)

CHINESE = (
    Relation(
        topic="reasoning",
        language="zh",
        columns=("one", "more", "other", "less"),
        facts=(
            ("小明", "高", "小红", "矮"),
            ("小刚", "年长", "小丽", "年轻"),
            ("小华", "快", "小芳", "慢"),
            ("大壮", "胖", "小林", "瘦"),
            ("阿强", "重", "阿美", "轻"),
            ("小军", "富有", "小云", "贫穷"),
        ),
        ask=(
            "{one}比{other}{more}，谁更{less}？",
            "{one}比{other}{more}，两个人里谁{less}？",
            "已知{one}比{other}{more}，请问谁更{less}？",
            "{one}比{other}更{more}，那么谁更{less}？",
            "谁更{less}？我们知道{one}比{other}{more}。",
            "你知道谁更{less}吗？{one}比{other}{more}。",
            "{one}和{other}相比，{one}更{more}。谁更{less}？",
            "{one}比{other}{more}，请告诉我谁更{less}。",
        ),
        ask_test=(
            "如果{one}比{other}{more}，他们当中谁更{less}呢？",
            "我知道{one}比{other}{more}，能告诉我谁更{less}吗？",
        ),
        answer="{other}更{less}。",
        statements=(
            "{one}比{other}{more}，所以{other}更{less}。",
            "如果{one}比{other}{more}，那么{other}比{one}{less}。",
        ),
    ),
    Relation(
        topic="reasoning",
        language="zh",
        columns=("cause", "effect"),
        facts=(
            ("天下雨", "地面会湿"),
            ("冰块变热", "冰块会融化"),
            ("杯子掉到地上", "杯子会碎"),
            ("按下开关", "电灯会亮"),
            ("大风吹来", "风筝会飞起来"),
        ),
        ask=(
            "如果{cause}，{effect}。现在{cause}了，会怎么样？",
            "只要{cause}，{effect}。今天{cause}了，会怎么样？",
            "已知{cause}，{effect}。现在{cause}了，结果是什么？",
            "{cause}，会怎么样？",
            "请问{cause}以后会怎么样？",
            "你知道{cause}会怎么样吗？",
            "请告诉我{cause}以后的结果。",
            "我看到{cause}了，接着会怎么样？",
        ),
        ask_test=(
            "我想知道{cause}以后会怎么样。",
            "如果{cause}，结果会怎么样呢？",
        ),
        answer="{effect}。",
        statements=(
            "如果{cause}，{effect}。",
            "只要{cause}，{effect}。",
            "{cause}以后，{effect}。",
        ),
    ),
    Relation(
        topic="reasoning",
        language="zh",
        columns=("thing", "kind"),
        facts=(
            ("玫瑰", "花"),
            ("土豆", "蔬菜"),
            ("老鹰", "鸟"),
            ("松树", "树"),
            ("黄金", "金属"),
        ),
        ask=(
            "{thing}是哪一类东西？",
            "{thing}属于哪一类？",
            "请问{thing}属于什么种类？",
            "我想知道{thing}属于哪个种类。",
            "请告诉我{thing}的种类。",
            "{thing}应该归到哪一类？",
            "{thing}是什么种类的东西？",
            "说出{thing}属于的种类。",
        ),
        ask_test=(
            "你知道{thing}属于哪一类吗？",
            "能告诉我{thing}是属于哪一类的吗？",
        ),
        answer="{thing}是一种{kind}。",
        statements=(
            "{thing}是一种{kind}。",
            "{thing}属于{kind}这一类。",
            "{thing}的种类是{kind}。",
        ),
    ),
)

RELATIONS = ENGLISH + CHINESE
