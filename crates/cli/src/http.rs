//! HTTP, with the encryption that AMQP has as well.

use leveret::amqp::Tls;
use reqwest::redirect::Policy;
use reqwest::{ClientBuilder, Url};

use crate::failure::Failure;
use crate::text::escape;

/// A client for what is at this URL. Nobody sends it elsewhere: there, what is to be done would be asked for as if it were to be
/// read.
pub(crate) async fn client_for(url: &Url, tls: &Tls) -> Result<ClientBuilder, Failure> {
    let mut unused = Tls::default();
    // Where nothing is encrypted, a system that trusts nobody is as good as any.
    unused.verify = false;
    let tls = if url.scheme() == "https" { tls } else { &unused };
    let config = tls.client_config().await.map_err(|error| {
        Failure::wrong(format_args!("{}: {error}", url.host_str().unwrap_or_default()))
    })?;
    let builder = reqwest::Client::builder().tls_backend_preconfigured(config);
    Ok(builder.redirect(Policy::none()))
}

/// Whether it is a URL to be asked over HTTP.
pub(crate) fn is_web(url: &Url) -> bool {
    matches!(url.scheme(), "http" | "https") && url.has_host()
}

/// The beginning of what something has answered, on one line: any program may listen at a port.
pub(crate) fn excerpt(text: &str) -> String {
    const SHOWN: usize = 300;
    let text = text.trim();
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => escape(&text[..end]) + "…",
        None => escape(text),
    }
}

/// Without passwords, and without tokens that may be in a query.
pub(crate) fn shown(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
    format!("{}://{host}{port}{}", url.scheme(), url.path())
}
