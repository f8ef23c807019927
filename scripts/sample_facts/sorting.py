"""Three things to put in order: numbers, words, sizes. A fixed list of instances."""

from .relation import Relation

ENGLISH = (
    Relation(
        topic="sorting",
        language="en",
        columns=("mixed", "ordered"),
        facts=(
            ("7, 3, 9", "3, 7, 9"),
            ("5, 1, 4", "1, 4, 5"),
            ("8, 2, 6", "2, 6, 8"),
            ("30, 10, 20", "10, 20, 30"),
        ),
        ask=(
            "Sort these numbers: {mixed}.",
            "Sort {mixed} from small to large.",
            "Put these numbers in order: {mixed}.",
            "Put {mixed} in order, the smallest first.",
            "What is the right order of {mixed}?",
            "Do you know how to sort {mixed}?",
            "Please order the numbers {mixed}.",
            "Here are three numbers: {mixed}. Sort them.",
            "{mixed}: sort these numbers from small to large.",
            "If I sort the numbers {mixed}, what do I get?",
            "I would like to see {mixed} in order, from small to large.",
        ),
        ask_test=(
            "Could you sort the numbers {mixed} for me?",
            "I have the numbers {mixed}. Put them in order, please.",
        ),
        answer="{ordered}.",
        statements=(
            "The numbers {mixed} in order are {ordered}.",
            "Sorted from small to large, {mixed} becomes {ordered}.",
        ),
    ),
    Relation(
        topic="sorting",
        language="en",
        columns=("mixed", "ordered"),
        facts=(
            ("cake, ant, bell", "ant, bell, cake"),
            ("dog, cup, egg", "cup, dog, egg"),
            ("lamp, jar, king", "jar, king, lamp"),
            ("nest, map, owl", "map, nest, owl"),
            ("train, sand, rope", "rope, sand, train"),
            ("zoo, wind, yard", "wind, yard, zoo"),
            ("queen, pig, rain", "pig, queen, rain"),
            ("hat, farm, goose", "farm, goose, hat"),
        ),
        ask=(
            "Sort these words: {mixed}.",
            "Sort {mixed} by the alphabet.",
            "Put these words in order: {mixed}.",
            "Put {mixed} in the order of the alphabet.",
            "What is the alphabet order of {mixed}?",
            "Do you know how to sort the words {mixed}?",
            "Please order the words {mixed}.",
            "Here are three words: {mixed}. Sort them.",
            "{mixed}: sort these words by the alphabet.",
            "If I sort the words {mixed}, what do I get?",
            "I would like to see {mixed} in the order of the alphabet.",
        ),
        ask_test=(
            "Could you sort the words {mixed} for me?",
            "I have the words {mixed}. Put them in order, please.",
        ),
        answer="{ordered}.",
        statements=(
            "The words {mixed} in the order of the alphabet are {ordered}.",
            "Sorted by the alphabet, {mixed} becomes {ordered}.",
        ),
    ),
)

CHINESE = (
    Relation(
        topic="sorting",
        language="zh",
        columns=("mixed", "ordered"),
        facts=(
            ("6、2、8", "2、6、8"),
            ("9、4、7", "4、7、9"),
            ("3、5、1", "1、3、5"),
            ("20、60、40", "20、40、60"),
        ),
        ask=(
            "把{mixed}从小到大排列。",
            "{mixed}从小到大怎么排？",
            "请把{mixed}按从小到大的顺序排好。",
            "从小到大排一排：{mixed}。",
            "{mixed}按从小到大的顺序是什么？",
            "你会把{mixed}从小到大排列吗？",
            "有三个数：{mixed}，请从小到大排列。",
            "给{mixed}排序，小的在前。",
            "{mixed}：从小到大写出来。",
            "如果把{mixed}从小到大排，结果是什么？",
            "能不能把{mixed}按从小到大的顺序写下来？",
        ),
        ask_test=(
            "请帮我给{mixed}这三个数从小到大排序。",
            "我想把{mixed}从小到大排好，应该怎么写？",
        ),
        answer="{ordered}。",
        statements=(
            "{mixed}从小到大排列是{ordered}。",
            "把{mixed}从小到大排好，就是{ordered}。",
        ),
    ),
    Relation(
        topic="sorting",
        language="zh",
        columns=("mixed", "ordered"),
        facts=(
            ("大象、老鼠、狗", "老鼠、狗、大象"),
            ("西瓜、樱桃、梨", "樱桃、梨、西瓜"),
            ("马、蚂蚁、鸡", "蚂蚁、鸡、马"),
            ("高楼、桌子、杯子", "杯子、桌子、高楼"),
            ("月球、太阳、地球", "月球、地球、太阳"),
            ("汽车、轮船、自行车", "自行车、汽车、轮船"),
            ("篮球、乒乓球、网球", "乒乓球、网球、篮球"),
            ("书柜、书、书包", "书、书包、书柜"),
        ),
        ask=(
            "把{mixed}按个头从小到大排列。",
            "{mixed}按个头从小到大怎么排？",
            "请把{mixed}按个头从小到大排好。",
            "按个头从小到大排一排：{mixed}。",
            "{mixed}谁小谁大？请从小到大说。",
            "你会给{mixed}按个头从小到大排队吗？",
            "{mixed}，哪个最小，哪个最大？请从小到大排列。",
            "给{mixed}按大小排序，小的在前。",
            "{mixed}：按个头从小到大说出来。",
            "如果让{mixed}按个头从小到大站好，是什么顺序？",
            "能不能给{mixed}按个头从小到大排一排？",
        ),
        ask_test=(
            "请帮我给{mixed}按个头排序，从小到大。",
            "我想把{mixed}从小到大排一下，应该怎么排？",
        ),
        answer="{ordered}。",
        statements=(
            "{mixed}按个头从小到大排列是{ordered}。",
            "{mixed}这三样，从小到大是{ordered}。",
        ),
    ),
)

RELATIONS = ENGLISH + CHINESE
