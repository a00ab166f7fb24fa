{{- define "pagoda.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "pagoda.selector" -}}
app.kubernetes.io/name: pagoda
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "pagoda.labels" -}}
{{ include "pagoda.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "pagoda.image" -}}
{{ .image.repository }}{{ with .image.digest }}@{{ . }}{{ else }}:{{ .image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}

{{- /* Options of a process from a map: true and false are --name and --no-name. */ -}}
{{- define "pagoda.settings" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
- --{{ if not $value }}no-{{ end }}{{ $name }}
{{- else if not (kindIs "invalid" $value) }}
- {{ printf "--%s=%v" $name $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "pagoda.channelArgs" -}}
{{- if .Values.channel.tokenSecret }}
- --channel-token-file=/etc/pagoda/channel/token
{{- end }}
{{- if .Values.channel.tls.routerSecret }}
- --channel-tls-cert=/etc/pagoda/channel-tls/tls.crt
- --channel-tls-key=/etc/pagoda/channel-tls/tls.key
- --channel-tls-ca=/etc/pagoda/channel-tls/ca.crt
{{- end }}
{{- end }}

{{- define "pagoda.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "pagoda.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "pagoda.environment" -}}
- {name: PAGODA_CACHE, value: /models}
- {name: HF_HOME, value: /models/huggingface}
{{- end }}

{{- /* Fetches the model into a volume that only this pod has. */ -}}
{{- define "pagoda.fetch" -}}
{{- if eq .root.Values.model.volume.kind "emptyDir" }}
initContainers:
  - name: model
    image: {{ include "pagoda.image" . }}
    imagePullPolicy: {{ .image.pullPolicy }}
    command: [python, -m, pagoda_server.checkpoints]
    args: [{{ .root.Values.model.name | quote }}]
    env: {{- include "pagoda.environment" . | nindent 6 }}
    securityContext: {{- include "pagoda.containerSecurity" . | nindent 6 }}
    resources: {{- toYaml .resources | nindent 6 }}
    volumeMounts:
      - {name: models, mountPath: /models}
      - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}

{{- define "pagoda.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
- name: models
{{- with .root.Values.model.volume }}
{{- if eq .kind "claim" }}
  persistentVolumeClaim: {claimName: {{ required "model.volume.claimName: which claim has the model?" .claimName }}, readOnly: true}
{{- else if eq .kind "image" }}
  image: {reference: {{ required "model.volume.reference: which image has the model?" .reference | quote }}, pullPolicy: IfNotPresent}
{{- else }}
  emptyDir: {sizeLimit: {{ .sizeLimit }}}
{{- end }}
{{- end }}
{{- with .root.Values.channel.tokenSecret }}
- name: channel
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- with .tlsSecret }}
- name: channel-tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "pagoda.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: models, mountPath: /models, readOnly: true}
{{- if .Values.channel.tokenSecret }}
- {name: channel, mountPath: /etc/pagoda/channel, readOnly: true}
{{- end }}
{{- if .Values.channel.tls.routerSecret }}
- {name: channel-tls, mountPath: /etc/pagoda/channel-tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "pagoda.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "pagoda.selector" . | nindent 8 }}
{{- end }}

{{- /* Refuses a release that would start unguarded, or not at all. */ -}}
{{- define "pagoda.check" -}}
{{- with .Values.channel }}
{{- if ne (empty .tls.routerSecret) (empty .tls.engineSecret) }}
{{- fail "channel.tls: give routerSecret and engineSecret, or neither" }}
{{- end }}
{{- if not (or .tokenSecret .tls.routerSecret .allowInsecure) }}
{{- fail "channel: give tokenSecret, or tls, or allowInsecure if the network itself guards the channel" }}
{{- end }}
{{- end }}
{{- with .Values.auth }}
{{- if not (or .tokenSecret .tenantsSecret .tlsSecret .allowInsecure) }}
{{- fail "auth: give tokenSecret, tenantsSecret or tlsSecret, or allowInsecure if something in front guards the routers" }}
{{- end }}
{{- end }}
{{- end }}
