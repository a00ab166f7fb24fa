// The page's own reader of streams, at URL and with the body BODY: prints the data of each event.

const [, , api, url, body] = process.argv;
globalThis.sessionStorage = { getItem: () => null };
const { events } = await import(api);
for await (const { data } of events(url, { body: JSON.parse(body) })) console.log(data);
