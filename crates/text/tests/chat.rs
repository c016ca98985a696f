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
        &"x".repeat(2 << 20),
    ] {
        let error = render(source).unwrap_err();
        assert!(matches!(error, ChatError::Template(_)), "{error}");
    }
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
