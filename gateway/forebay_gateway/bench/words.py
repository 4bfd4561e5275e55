"""Words for prompts in text: after a space, each is one token in common BPE vocabularies."""

_TEXT = """
able about above add after again air all also always among and animal answer any area ask back
bank base be bed before begin best better big bird black blue board boat body book both box boy
bring build but buy call can car care carry case cause center certain change check children city
class clear close cold color come common complete could country course cover cross cut dark day
deep develop did direct do door down draw drive dry during each early earth east easy eat end
enough even ever every example eye face fact fall family far farm fast father feel few field
figure final find fine fire first fish five fly follow food foot force form found four free friend
from front full game gave general get girl give glass go gold good great green ground group grow
half hand happy hard head hear heart heat help here high hold home horse hot hour house idea inch
island job keep kind king know land language large last late lead learn leave left less letter
life light like line list listen little live local long look low machine main make man many map
mark matter mean measure men might mile mind minute money moon morning most mother mountain move
music name near need never new next night north note number object ocean off office often old once
only open order other over own page paper part pass people perhaps person picture piece place
plain plan plane plant play point port pose power press problem product pull put question quick
rain reach read ready real red rest right river road rock room round rule run same school science
sea second see sentence set seven several shape ship short should show side simple since six size
sleep slow small snow some song soon sound south special spell stand star start state stay step
stop story street strong study such sun sure table take talk teach tell ten test thing think those
though thought three time together told top town travel tree true try turn two under unit until
use usual very voice vowel walk wall want warm watch water way week weight well west wheel white
whole wind wish with wonder wood word work world write year young
"""

WORDS = tuple(_TEXT.split())
