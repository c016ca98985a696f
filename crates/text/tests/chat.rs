//! Chat templates render as in transformers, and answers are found in what they render.

mod common;

use proptest::prelude::*;
use serde_json::Value;
use tightfit_text::{ChatError, ChatTemplate, Message, SpecialToken, SpecialTokens};

fn fixtures() -> Value {
    serde_json::from_slice(&common::bytes("chat.json")).unwrap()
}

fn tokens() -> SpecialTokens {
    let token = |id, content: &str| {
        Some(SpecialToken {
            id,
            content: content.into(),
        })
    };
    SpecialTokens {
        bos: token(1, "<s>"),
        eos: token(2, "</s>"),
        pad: None,
        unk: None,
    }
}

fn template(fixtures: &Value, name: &str) -> ChatTemplate {
    ChatTemplate::new(fixtures["templates"][name].as_str().unwrap(), &tokens()).unwrap()
}

fn conversation(fixtures: &Value, name: &str) -> Vec<Message> {
    let message = |m: &Value| Message {
        role: m["role"].as_str().unwrap().into(),
        content: m["content"].as_str().unwrap().into(),
    };
    fixtures["conversations"][name]
        .as_array()
        .unwrap()
        .iter()
        .map(message)
        .collect()
}

#[test]
fn texts_are_those_of_transformers() {
    let fixtures = fixtures();
    let cases = fixtures["cases"].as_array().unwrap();
    assert!(
        cases.iter().any(|case| case["error"].is_string()),
        "a refusal is among the cases"
    );
    for case in cases {
        let [name, messages] = ["template", "conversation"].map(|key| case[key].as_str().unwrap());
        let got = template(&fixtures, name).render(
            &conversation(&fixtures, messages),
            case["add_generation_prompt"].as_bool().unwrap(),
        );
        match (got, case["error"].as_str()) {
            (Ok(text), None) => assert_eq!(text, case["text"].as_str().unwrap(), "{name}, {messages}"),
            (Err(ChatError::Render(error)), Some(reason)) => {
                assert!(error.contains(reason), "{name}, {messages}: {error}")
            }
            (got, expected) => panic!("{name}, {messages}: {got:?} where transformers has {expected:?}"),
        }
    }
}

fn answers(template: &ChatTemplate, messages: &[Message]) -> Vec<String> {
    let segments = template.segments(messages).unwrap();
    let text: String = segments.iter().map(|s| &*s.text).collect();
    assert_eq!(text, template.render(messages, false).unwrap());
    segments.into_iter().filter(|s| s.answer).map(|s| s.text).collect()
}

#[test]
fn answers_are_found_with_what_ends_them() {
    let fixtures = fixtures();
    let system = conversation(&fixtures, "system");
    let of = |name| answers(&template(&fixtures, name), &system);
    assert_eq!(of("chatml"), [" 2 <|im_end|>", "你好！\n<|im_end|>"]);
    assert_eq!(of("llama3"), ["2<|eot_id|>", "你好！<|eot_id|>"]);
    assert_eq!(of("mistral"), [" 2</s>", " 你好！</s>"]);
    assert_eq!(of("generation"), [" 2 </a>", "你好！\n</a>"]);
    assert_eq!(
        answers(&template(&fixtures, "qwen"), &conversation(&fixtures, "one")),
        [""; 0]
    );
}

#[test]
fn a_template_that_rewrites_earlier_turns_is_an_error() {
    let fixtures = fixtures();
    let error = template(&fixtures, "qwen")
        .segments(&conversation(&fixtures, "think"))
        .unwrap_err();
    assert!(
        matches!(&error, ChatError::Rewrites { message: 1, role } if role == "assistant"),
        "{error}"
    );
}

#[test]
fn templates_have_limits() {
    let tokens = SpecialTokens::default();
    let hi = [Message {
        role: "user".into(),
        content: "hi".into(),
    }];
    let render = |source: &str| ChatTemplate::new(source, &tokens).and_then(|t| t.render(&hi, false));
    assert_eq!(render("{{ messages[0].content }}").unwrap(), "hi");
    let forever = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}";
    let doubling = format!(
        "{{% set x = 'xxxxxxxx' %}}{}{{{{ x }}}}",
        "{% set x = x ~ x %}".repeat(40)
    );
    let recursion = "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}";
    for source in [
        forever,
        &doubling,
        recursion,
        "{{ 'x' * 1000000000 }}",
        "{{ strftime_now('%Y') }}",
        "{{ raise_exception('no') }}",
    ] {
        let error = render(source).unwrap_err();
        assert!(matches!(error, ChatError::Render(_)), "{error}");
    }
    // What is cheap once is not for each answer, and what is small once is not for each message.
    let answers = vec![
        Message {
            role: "assistant".into(),
            content: "x".into(),
        };
        900
    ];
    let slow = "{% for m in messages %}{{ m.content }}{% for i in range(60) %}{% endfor %}{% endfor %}";
    let slow = ChatTemplate::new(slow, &tokens).unwrap();
    slow.render(&answers, false).unwrap();
    let error = slow.segments(&answers).unwrap_err();
    assert!(matches!(error, ChatError::Render(_)), "{error}");
    let large = "{% for m in messages %}{{ 'x' * 30000 }}{% endfor %}";
    let large = ChatTemplate::new(large, &tokens).unwrap();
    large.render(&answers[..9], false).unwrap();
    let error = large.render(&answers, false).unwrap_err();
    assert!(matches!(error, ChatError::Render(_)), "{error}");
    let nested = "(".repeat(10_000);
    for source in [
        "{% if %}",
        "{{ x",
        "{% generation %}",
        &format!("{{{{ {nested}1 }}}}"),
        &"x".repeat(65 << 10),
    ] {
        let error = render(source).unwrap_err();
        assert!(matches!(error, ChatError::Template(_)), "{error}");
    }
}

/// A template of just under 64 KiB: `before`, `unit` as often as it fits, `after`.
fn filled(before: &str, unit: &str, after: &str) -> String {
    let times = ((64 << 10) - before.len() - after.len()) / unit.len();
    [before, &unit.repeat(times), after].concat()
}

#[test]
fn long_expressions_do_not_overflow_the_stack() {
    let hi = [Message {
        role: "user".into(),
        content: "hi".into(),
    }];
    for (before, unit, after) in [
        ("{{ ", "-", "x }}"),
        ("{{ ", "not ", "x }}"),
        ("{{ x", "+1", " }}"),
        ("{{ x", "~1", " }}"),
        ("{{ x", "**1", " }}"),
        ("{{ x", " and x", " }}"),
        ("{{ x", " or x", " }}"),
        ("{{ x", ".a", " }}"),
        ("{{ x", "[0]", " }}"),
        ("{{ x", "()", " }}"),
        ("{{ x", "|list", " }}"),
        ("{{ x", " is not none", " }}"),
        ("{{ ", "x if y else ", "x }}"),
        ("{{ x ", "if x ", " }}"),
        ("{{ x", "<1", " }}"),
        ("{{ ", "(", "x }}"),
        ("{{ ", "[", "x }}"),
        ("{{ ", "{1:", "x }}"),
        ("{% if x %}", "{% elif x %}", "{% endif %}"),
        ("", "{% if x %}", ""),
        ("", "{% for x in x %}", ""),
        ("{% set x = [1] %}", "{% set x = [x] %}", "{{ x }}"),
        ("{% set x = [1] %}", "{% set x = x[0:] %}", "{{ x }}"),
        ("{% set x = [1] %}", "{% set x = [1] + x %}", "{{ x|length }}"),
        ("{% filter upper", "|upper", " %}{% endfilter %}"),
        ("{% macro m(", "a,", "b) %}{% endmacro %}"),
    ] {
        let long = filled(before, unit, after);
        // Also the longest that is let through, in a debug build too.
        let most = [before, &unit.repeat(490), after].concat();
        for source in [long, most] {
            if let Ok(template) = ChatTemplate::new(&source, &tokens()) {
                let _ = template.render(&hi, false);
            }
        }
    }
    let most = format!("{{{{ {}1 }}}}", "-".repeat(900));
    let template = ChatTemplate::new(&most, &tokens()).unwrap();
    assert_eq!(template.render(&hi, false).unwrap(), "1");
}

#[test]
fn values_cannot_hold_themselves_or_grow_for_nothing() {
    let render = |source: &str| ChatTemplate::new(source, &tokens()).unwrap().render(&[], false);
    let ns = "{% set ns = namespace(x=[1]) %}";
    let double = "{% set x = [1] %}";
    for source in [
        format!("{ns}{{% set ns.x = ns %}}{{{{ ns }}}}"),
        format!("{ns}{{% set ns.x = [{{'a': ns}}] %}}{{{{ ns|tojson }}}}"),
        format!("{ns}{{% set y = ns %}}{{% for z in [y] %}}{{% set ns.x = z %}}{{% endfor %}}{{{{ ns }}}}"),
        format!("{ns}{{% set ns2 = namespace(y=ns) %}}{{{{ ns2 }}}}"),
        format!("{ns}{{% macro m() %}}{{{{ ns }}}}{{% endmacro %}}{{% set ns.x = m %}}{{{{ ns.x() }}}}"),
        format!("{ns}{{% set ns.x, y = ns, 1 %}}{{{{ ns }}}}"),
        format!("{ns}{{% for i in range(40) %}}{{% set ns.x = ns.x + ns.x %}}{{% endfor %}}{{{{ ns.x|length }}}}"),
        format!("{ns}{{% for i in range(60) %}}{{% set ns.x = [ns.x, ns.x] %}}{{% endfor %}}{{{{ ns.x == ns.x }}}}"),
        format!("{double}{}{{{{ x|length }}}}", "{% set x = x + x %}".repeat(64)),
        format!("{double}{}{{{{ x|length }}}}", "{% set x = x|chain(x) %}".repeat(64)),
        format!("{double}{}{{{{ x }}}}", "{% set x = [x, x] %}".repeat(30)),
        format!("{double}{}{{{{ x }}}}", "{% set x = x, x %}".repeat(30)),
        format!("{double}{}{{{{ x }}}}", "{% set x = dict(a=x, b=x) %}".repeat(30)),
        format!("{double}{}{{{{ x }}}}", "{% set x = [0, 0]|map('default', x, true)|list %}".repeat(30)),
        format!("{double}{}{{{{ x }}}}", "{% set x = [x] %}".repeat(2000)),
        "{% macro m(x, n) %}{% if n %}{{ m(x + x + x + x + x + x + x + x, n - 1) }}{% endif %}{% endmacro %}{{ m([1], 15) }}".into(),
        "{% macro m(x, n) %}{% if n %}{{ m([x, x, x, x, x, x], n - 1) }}{% else %}{{ x }}{% endif %}{% endmacro %}{{ m([1], 15) }}".into(),
    ] {
        let rendered = render(&source);
        assert!(matches!(rendered, Err(ChatError::Render(_))), "{source}: {rendered:?}");
    }
    for source in [
        "{{ ['x'] * 100000 ~ '' }}",
        "{% set n = 9 %}{{ n * ([1])|join }}",
        "{{ x * x }}",
    ] {
        let error = ChatTemplate::new(source, &tokens()).unwrap_err();
        assert!(error.to_string().contains("`*`"), "{source}: {error}");
    }
    // A namespace keeps what a list that is made later would hold, not the list.
    let items = format!("{ns}{}{{{{ ns }}}}", "{% set ns.x = ns.items() %}".repeat(2));
    assert_eq!(render(&items).unwrap(), "{'x': [['x', [['x', [1]]]]]}");
    // What templates use namespaces and lists for.
    let useful = "{% set ns = namespace(n=0, found=false, names=[]) %}{% for m in ['a', 'b'] + ['c'] %}{% set ns.n = ns.n + 1 %}\
        {%- set ns.found = ns.found or m == 'b' -%}{% set ns.names = ns.names + [m] %}{% endfor %}\
        {{- ns.n + 1 }} {{ ns.found }} {{ ns.names|join('+') }} {{ {'a': [1, (2, 3)]}['a'][1][0] }} {{ ns.names[1:] }}";
    assert_eq!(render(useful).unwrap(), "4 True a+b+c 2 ['b', 'c']");
}

proptest! {
    #[test]
    fn any_source_is_a_template_or_an_error(source in "([a-z{}%#|()'\\[\\]. \n-]|\\{\\{|\\{%|%\\}|\\}\\}|for |in |messages|if |endif|set |generation|tojson){0,60}") {
        let hi = [Message { role: "assistant".into(), content: "hi".into() }];
        if let Ok(template) = ChatTemplate::new(&source, &SpecialTokens::default()) {
            let _ = template.render(&hi, true);
            if let Ok(segments) = template.segments(&hi) {
                let text: String = segments.iter().map(|s| &*s.text).collect();
                prop_assert_eq!(text, template.render(&hi, false).unwrap());
            }
        }
    }
}
